"""The delta rule by the kernels of flash-linear-attention: `delta_rule` for --linear-attention-kernel fla.

Its functions take samples first. Documents are sequences of any length in one sample, so the samples of a micro-batch
follow each other there. A document's first chunk starts with it, in place of masks inside chunks.

The package computes states, but no map of states (`recurrence_map`), so context parallelism must exchange heads. It
multiplies in the precision of the inputs, and sums decays from the start of a chunk, where decayed_scores.py sums
between two tokens. On the first call it selects tiles by time, so two processes may round differently.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.kernels.dispatch import KernelError, runs_fla
from megalite.kernels.recurrence_inputs import Recurrence, RecurrenceInputs


def supports(inputs: RecurrenceInputs) -> bool:
    """Return whether these inputs run in the package's kernels: a recurrence with a correction, if they are selected.

    Raises:
        KernelError: if they are selected and the inputs are fp64.
    """
    if inputs.beta is None or torch.compiler.is_compiling() or not runs_fla(inputs.v.device.type):
        return False
    if inputs.v.dtype == torch.float64:
        raise KernelError(
            "linear_attention_kernel=fla computes at most in fp32, not in fp64; use --linear-attention-kernel auto"
        )
    return True


class _Sequences(NamedTuple):
    """The documents of B samples as N sequences of one sample.

    boundaries  the first token of each sequence, and the number of all tokens, [N + 1]
    first_B     the sequence of each sample's first token
    last_B      the sequence of its last token
    """

    boundaries: Tensor
    first_B: Tensor
    last_B: Tensor


def _sequences(documents_BS: Tensor) -> _Sequences:
    """Return the sequences; waits for the device, because their number is a shape."""
    is_first_BS = torch.ones_like(documents_BS, dtype=torch.bool)
    is_first_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    starts = is_first_BS.flatten().nonzero().flatten()
    sequence_BS = is_first_BS.flatten().cumsum(0).view_as(documents_BS) - 1
    boundaries = torch.cat([starts, starts.new_full((1,), documents_BS.numel())])
    return _Sequences(boundaries, sequence_BS[:, 0], sequence_BS[:, -1])


def _initial_states(state_BHKV: Tensor, recurrence: Recurrence, sequences: _Sequences) -> Tensor:
    """Return the states before each sequence: a sample's state before its first one, otherwise zeros."""
    if recurrence.documents_BS is not None and recurrence.previous_B is not None:
        is_continued_B = recurrence.documents_BS[:, 0] == recurrence.previous_B
        state_BHKV = state_BHKV.where(is_continued_B.view(-1, 1, 1, 1), 0.0)
    states = state_BHKV.new_zeros(len(sequences.boundaries) - 1, *state_BHKV.shape[1:])
    return states.index_copy(0, sequences.first_B, state_BHKV)


def delta_rule(inputs: RecurrenceInputs, recurrence: Recurrence, state_BHKV: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute `delta_rule` of kernels/delta_rule.py; the size of chunks is the package's."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    function: Any = chunk_kda if inputs.is_channel_decay else chunk_gated_delta_rule
    q, k, v, g, beta = (x.transpose(0, 1) for x in inputs if x is not None)
    state = None if state_BHKV is None else state_BHKV.float()
    sequences = None
    if recurrence.documents_BS is not None:
        sequences = _sequences(recurrence.documents_BS)
        q, k, v, g, beta = (x.flatten(0, 1)[None] for x in (q, k, v, g, beta))
        state = None if state is None else _initial_states(state, recurrence, sequences)
    o, last = function(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        scale=recurrence.scale,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=recurrence.normalize_qk,
        cu_seqlens=None if sequences is None else sequences.boundaries,
    )
    S, B, H, V = inputs.v.shape
    o_SBHV = o.view(B, S, H, V).transpose(0, 1).contiguous()
    return o_SBHV, last if sequences is None else last[sequences.last_B]
