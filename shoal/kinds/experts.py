"""ExpertsKind: a description of a layer's mixture of experts: how its router chooses, what an expert
computes, and the shared expert beside them. No torch. kernels/moe/ computes with these numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class Router:
    """The rule by which router logits become the experts of a token and their weights.

    An expert's score is a softmax or a sigmoid of the logits, in float32. The experts of the best scores are
    chosen. A correction bias of the checkpoint takes part in the choice, and not in the weights. Weights are
    the scores of the chosen experts, divided by their sum if `renormalize`, times `scale`.

    With groups, experts that follow one another are one group, groups are of equal sizes, and experts are
    chosen out of the best `top_k_groups` groups alone.
    """

    top_k: int  # experts of a token
    renormalize: bool = False  # the weights of a token's experts sum to `scale`
    # "chosen": logits choose, and weights are a softmax over the chosen experts' logits
    scores: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    eps: float = 0.0  # is added to the sum by which weights are divided
    scale: float = 1.0
    softcap: float | None = None  # logits are softcap * tanh(logits / softcap) first
    num_groups: int = 1
    top_k_groups: int = 1
    group_score: Literal["maximum", "two best"] = "maximum"  # its experts' largest score, or the sum of two
    float32: bool = False  # logits are computed in float32, whatever the engine's dtype
    # tensors of the checkpoint
    bias: bool = False  # is added to the logits
    correction: bool = False
    expert_scale: bool = False  # a factor of each expert's weight
    # Set by ExpertsKind.join: the shared expert is the last of the experts, and each token has it
    joined: bool = False  # with a weight of 1
    joined_gate: bool = False  # instead with the sigmoid of one more logit, the last one

    @property
    def num_slots(self) -> int:
        """Experts of a token, the shared one included."""
        return self.top_k + self.joined


@dataclass(frozen=True, slots=True)
class Activation:
    """The activation of an expert, which takes gate and up, or up alone.

    silu, gelu_tanh: function(gate) * up. relu2: the square of relu(up); there is no gate.
    clamped_swiglu: (up + 1) * gate * sigmoid(alpha * gate), gate at most `limit`, up within +- `limit`."""

    kind: Literal["silu", "gelu_tanh", "clamped_swiglu", "relu2"] = "silu"
    alpha: float = 1.0
    limit: float = 0.0

    @property
    def has_gate(self) -> bool:
        return self.kind != "relu2"


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An MLP that each token passes in addition to the experts that its router chooses."""

    intermediate_size: int
    gated: bool = False  # its result is multiplied by the sigmoid of one more output of a router


@dataclass(frozen=True, slots=True)
class ExpertsKind:
    """A mixture of experts."""

    num_experts: int
    intermediate_size: int  # each expert's
    router: Router
    activation: Activation = Activation()
    biases: bool = False  # each expert's matrices have them
    shared: SharedExpert | None = None
    latent_size: int | None = None  # numbers of a token that experts see; None: all of its hidden state

    @property
    def num_matrices(self) -> int:
        """Experts, a joined shared one included."""
        return self.num_experts + self.router.joined

    def join(self) -> ExpertsKind:
        """Returns the mixture with its shared expert as the last of the experts, so that their kernels run it
        too. A shared expert of another size stays apart, and where matrices have biases."""
        shared, biased = self.shared, self.biases or self.router.bias
        if shared is None or shared.intermediate_size != self.intermediate_size or biased:
            return self
        return replace(self, router=replace(self.router, joined=True, joined_gate=shared.gated), shared=None)
