"""Programs around a run. A package, so that no other package called tools on sys.path can take its place."""
