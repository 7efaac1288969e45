"""The identity of tensors' storages, which also have one on the meta device, where they have no address.

torch has no public function for it: `_cdata` is the address of the storage object, which all views of it share.
"""

from torch import Tensor


def storage_id(x: Tensor) -> int:
    """Return the identity of the storage of x, valid while the storage exists."""
    return x.untyped_storage()._cdata


def shares_storage(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors are views of the same storage."""
    return storage_id(x) == storage_id(y)
