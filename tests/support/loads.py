from checkpoint_loads import *  # noqa: F403  until all tests use the new name
