from pairwise import *  # noqa: F403  until all tests use the new name
