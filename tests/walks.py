"""What tests ask of a model besides its loss."""

from torch import Tensor

from raptr.data.batch import Batch
from raptr.models.bert.model import Bert
from raptr.models.model import Model
from raptr.subnetworks import Subnetwork


def hidden(model: Bert, tokens_BS: Tensor, subnetwork: Subnetwork, segments_BS: Tensor | None = None) -> Tensor:
    """The encoder's output after the final norm, (B, S, D)."""
    nowhere = tokens_BS[:, :0]
    x_BSD = model.hidden(Batch(tokens_BS, nowhere, nowhere, segments_BS), model.inputs(subnetwork))
    normed: Tensor = model.head.final_norm(x_BSD)
    return normed


def scores(model: Model, batch: Batch, subnetwork: Subnetwork) -> Tensor:
    """Scores over the vocabulary at the targets, (B, M, V)."""
    return model.scores(model.hidden(batch, model.inputs(subnetwork)), batch)
