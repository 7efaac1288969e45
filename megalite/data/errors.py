"""What goes wrong with data."""


class DataError(ValueError):
    """Data that cannot be used, by name and reason."""
