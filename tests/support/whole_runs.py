from program_runs import *  # noqa: F403  until all tests use the new name
