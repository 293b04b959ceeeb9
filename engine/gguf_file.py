"""A GGUF file as metadata and tensors, read by the library `gguf` without trusting a count in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFValueType, ReaderTensor

from .errors import CheckpointError

__all__ = ["read_gguf"]

LONGEST_ARRAY = 1 << 22  # elements; vocabularies and merges stay below a million


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, ReaderTensor]]:
    """Metadata and tensors by name; the tensors' data stay in the file until they are used.

    Raises CheckpointError for a file that is truncated or damaged, or holds tensors that overlap.
    """
    try:
        reader = _Reader(file)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError, OSError) as error:
        raise CheckpointError(f"{file} is truncated or no GGUF file ({error}); copy or download it again") from error
    end = 0
    for tensor in sorted(reader.tensors, key=lambda tensor: (tensor.data_offset, tensor.n_bytes)):
        if tensor.data_offset < end:
            raise CheckpointError(f"{file} is damaged: tensor {tensor.name!r} overlaps another; copy it again")
        end = tensor.data_offset + tensor.n_bytes
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


class _Reader(GGUFReader):
    """The library's reader takes what lies beyond the end of the file for empty, so that a damaged count keeps it busy
    for ever; this one refuses it."""

    def _get(self, offset: int, dtype: npt.DTypeLike, count: int = 1, override_order: Any = None) -> npt.NDArray[Any]:
        values = super()._get(offset, dtype, count, override_order)
        if len(values) < count:
            raise ValueError(f"it ends before {count} values at byte {offset}")
        return values

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == GGUFValueType.ARRAY and self._get(orig_offs + 4, np.uint64)[0] > LONGEST_ARRAY:
            raise ValueError(f"the array at byte {orig_offs} has more than {LONGEST_ARRAY} elements")
        return super()._get_field_parts(orig_offs, raw_type)
