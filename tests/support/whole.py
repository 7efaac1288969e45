from full_tensors import *  # noqa: F403  until all tests use the new name
