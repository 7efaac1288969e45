"""Multi-token prediction (arXiv:2412.19437, sec. 2.2): depth k predicts the token k + 1 ahead of each position.

    h^0 = final norm of the model                                                        predicts t_(i+1)
    h^k = norm(layers_k(eh_proj [enorm(embedding(t_(i+k))), hnorm(h^(k-1))]))            predicts t_(i+k+1)

All depths use the model's embedding and head, and run beside the head on the last pipeline stage. Their inputs, labels
and masks come shifted from the loader (training/batch.py), so there are no messages between ranks. The projection
multiplies each tp rank's own positions, without a collective. Generation does not run the depths.
"""

import torch
from torch import Tensor, nn

from megalite.config.options import ModelConfig
from megalite.nn.embedding import Embedding
from megalite.nn.linear import replicated_linear
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.nn.norm import Norm
from megalite.nn.parameter import ParamFactory, shapes
from megalite.parallel.spec import Normal, ParamSpec


class MTPEmbedding(nn.Module):
    """The embedding of the inputs of all depths.

    embedding   the model's; on a last stage that is not the first, a tied copy of it
    num_depths  the number of depths
    """

    def __init__(self, embedding: Embedding, num_depths: int):
        super().__init__()
        self.embedding = embedding
        self.num_depths = num_depths

    def forward(self, batch: Batch, ctx: ForwardContext) -> Tensor:
        """Return the embeddings of all depths, one after the other along the sequence: [n s, B, D]."""
        embeddings = [self.embedding(batch.mtp_input(depth), ctx, depth) for depth in range(1, self.num_depths + 1)]
        return torch.cat(embeddings) if self.num_depths > 1 else embeddings[0]


class MTPLayer(nn.Module):
    """A depth of multi-token prediction.

    name    prefix of the names of its parameters
    unit    name of the unit that its first block belongs to
    blocks  its layers, as the model has them
    """

    def __init__(self, make_param: ParamFactory, name: str, unit: str, model: ModelConfig, blocks: list[nn.Module]):
        super().__init__()
        make_param = make_param.for_unit(unit)
        D = model.hidden_size
        self.enorm = Norm(make_param, f"{name}.enorm", D, model)
        self.hnorm = Norm(make_param, f"{name}.hnorm", D, model)
        eh_proj = ParamSpec(
            f"{name}.eh_proj", (D, 2 * D), partial_grad_axes=("tp",), init=Normal(model.init_method_std)
        )
        self.eh_proj = make_param(eh_proj)
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = Norm(make_param, f"{name}.final_norm", D, model)

    def extra_repr(self) -> str:
        return shapes(self)

    def forward(self, h_sBD: Tensor, embedding_sBD: Tensor, batch: Batch, ctx: ForwardContext) -> Tensor:
        """Return h^k from h^(k-1) and the embeddings of this depth's inputs."""
        x_sBC = torch.cat((self.enorm(embedding_sBD), self.hnorm(h_sBD)), -1)
        x_sBD = replicated_linear(x_sBC, self.eh_proj, ctx.wgrad_store)
        for block in self.blocks:
            x_sBD = block(x_sBD, batch, ctx)
        return self.final_norm(x_sBD)
