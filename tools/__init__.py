"""Programs around a run. This is a package so that no other package named tools on sys.path can shadow it."""
