"""What a model is made of, by mechanism. No family names, no file-format names: those end in `models/families.py`."""

from dataclasses import dataclass
from typing import Literal

from jaxrt.errors import UnsupportedModel


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding over half-split pairs (dimension i turns with i + H/2).

    scaling "llama3" is the wavelength-dependent one of the Llama 3.1 report; "linear" divides every
    frequency by `factor`.
    """

    theta: float = 10_000.0
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8_192  # tokens the unscaled frequencies were trained for


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer's own choices; layers of one model may differ."""

    rope: RopeSpec | None = RopeSpec()  # None: nothing is turned


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model. Letters: DESIGN vocabulary (D width, F MLP width, N heads, K KV heads, H head)."""

    family: str  # the row of the families table it was read with; for people and plans, never for the mathematics
    vocab: int  # V
    width: int  # D
    mlp_width: int  # F
    heads: int  # N
    kv_heads: int  # K
    head_width: int  # H
    layers: tuple[LayerSpec, ...]  # L of them
    context: int  # most positions the model was made for
    norm_eps: float = 1e-5
    tied_head: bool = False  # the head is the embedding table
    qkv_bias: bool = False  # queries, keys and values have biases
    # what queries and keys are normalised over, before they are turned: each head, or all of a position's heads
    head_norm: Literal["none", "head", "all"] = "none"
    norms: Literal["before", "after"] = "before"  # of attention and MLP: of what goes in, or of what comes out
    bos_token: int | None = None
    eos_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab", "width", "mlp_width", "heads", "kv_heads", "head_width", "context"):
            value = getattr(self, name)
            if value < 1:
                raise UnsupportedModel(f"{name} is {value}", expected="a positive integer")
        if not self.layers:
            raise UnsupportedModel("the model has no layers", expected="at least one")
        if self.heads % self.kv_heads:
            raise UnsupportedModel(
                f"{self.heads} query heads and {self.kv_heads} KV heads", expected="a whole multiple"
            )
        if self.head_width % 2:
            raise UnsupportedModel(f"head width {self.head_width}", expected="an even one (rotary pairs)")

    @property
    def head_norm_widths(self) -> tuple[int, ...]:
        """Of the norms of queries and of keys; none where there are none."""
        each = {"none": (), "head": (1, 1), "all": (self.heads, self.kv_heads)}[self.head_norm]
        return tuple(count * self.head_width for count in each)

    @property
    def parameters(self) -> int:
        """Number of weights, a tied head counted once."""
        per_layer = (
            self.width * self.head_width * (2 * self.heads + 2 * self.kv_heads)
            + 3 * self.width * self.mlp_width
            + 2 * self.width
            + self.qkv_bias * self.head_width * (self.heads + 2 * self.kv_heads)
            + sum(self.head_norm_widths)
        )
        tables = self.vocab * self.width * (1 if self.tied_head else 2)
        return len(self.layers) * per_layer + tables + self.width
