"""Multi-head latent attention, reached before its keys and values are expanded.

transformers' families of it (DeepSeek-V2 and V3, Kimi, GLM, MiniCPM3 and others) make keys and
values of a token from one latent vector and one rotary key, in `expand_kv`:

    key of head a      [U_a c, r]        value of head a      V_a c

`LatentHeads` takes the place of that method: the attention function gets tensors of the right
shapes that hold nothing, and finds c and r by `taken`. In the absorbed form (Liu et al. 2024,
DeepSeek-V2, 2.1.2) a query attends to the latent vectors themselves,

    q . [U_a c, r]  =  [U_a^T q_nope, q_rope] . [c, r]      sum of p V_a c  =  V_a (sum of p c)

Legend: T tokens, A heads of this rank, P key entries without position, R rotary ones, L latent
size, E value size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


class LatentHeads(nn.Module):
    """Up-projections of one attention layer's latent vectors.

    Args:
        weight: U and V of each head, [A, P + E, L].
        plain: P. rotary: R.
    """

    def __init__(self, weight: Tensor, plain: int, rotary: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.plain, self.rotary = plain, rotary
        self._taken: Tensor | None = None

    @property
    def keys(self) -> Tensor:
        """U, [A, P, L]."""
        return self.weight[:, : self.plain]

    @property
    def values(self) -> Tensor:
        """V, [A, E, L]."""
        return self.weight[:, self.plain :]

    @property
    def num_heads(self) -> int:
        """A."""
        return int(self.weight.shape[0])

    @property
    def key_size(self) -> int:
        """P + R."""
        return self.plain + self.rotary

    @property
    def value_size(self) -> int:
        """E."""
        return int(self.weight.shape[1]) - self.plain

    @property
    def latent_size(self) -> int:
        """L."""
        return int(self.weight.shape[2])

    @property
    def width(self) -> int:
        """Of what is cached of a token: L + R."""
        return self.latent_size + self.rotary

    def forward(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """As `expand_kv` is called, with [1, 1, T, L] and [1, 1, T, R]; keys and values of which
        only the shapes mean something."""
        self._taken = torch.cat([latent[0, 0], rotary[0, 0]], -1)
        nothing = latent.new_zeros(1)
        shape = (1, self.num_heads, latent.shape[2])
        return nothing.expand(*shape, self.key_size), nothing.expand(*shape, self.value_size)

    def taken(self) -> Tensor:
        """[T, L + R], latent vectors and rotary keys of the call that expands now."""
        found, self._taken = self._taken, None
        assert found is not None
        return found

    def absorb(self, query: Tensor) -> Tensor:
        """Queries [A, T, P + R] that attend to what is cached: [A, T, L + R]."""
        plain, turned = query.split([self.plain, self.rotary], -1)  # type: ignore[no-untyped-call]
        return torch.cat([torch.bmm(plain, self.keys), turned], -1)

    def read(self, mixed: Tensor) -> Tensor:
        """What was attended to [A, T, L] as values [A, T, E]."""
        return torch.bmm(mixed, self.values.transpose(1, 2))

    def expand(self, cached: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [A, N, P + R] and values [A, N, E] of N cached tokens [N, L + R]."""
        latent, rotary = cached.split([self.latent_size, self.rotary], -1)  # type: ignore[no-untyped-call]
        keys = torch.cat(
            [latent @ self.keys.transpose(1, 2), rotary.expand(self.num_heads, -1, -1)], -1
        )
        return keys, latent @ self.values.transpose(1, 2)


def latent_heads(module: nn.Module, dtype: torch.dtype | None = None) -> LatentHeads | None:
    """The up-projections of an attention layer that holds its values; None: it has no latent
    vectors, or makes keys and values of them in another way (which is tried).

    Args:
        dtype: of what the layer is given, and so of the up-projections. None: of its weight.
    """
    own: Any = getattr(module, "expand_kv", None)
    weight = getattr(getattr(module, "kv_b_proj", None), "weight", None)
    sizes = [getattr(module, name, None) for name in _SIZES]
    if own is None or not isinstance(weight, Tensor) or not all(isinstance(s, int) for s in sizes):
        return None
    latent, plain, rotary, value = (int(size) for size in sizes if size is not None)
    if weight.dim() != 2 or weight.shape[1] != latent or weight.shape[0] % (plain + value):
        return None
    both = weight.detach().to(dtype or weight.dtype).view(-1, plain + value, latent)
    found = LatentHeads(both, plain, rotary)
    return found if _equal(own, found) else None


_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@torch.no_grad()
def _equal(own: Any, heads: LatentHeads) -> bool:
    """Whether a layer's own expansion gives the same keys and values."""
    like = heads.weight
    cached = torch.linspace(-1, 1, 3 * heads.width, device=like.device).view(3, heads.width)
    cached = (40 * cached).sin().to(like.dtype)
    latent, rotary = cached.split([heads.latent_size, heads.rotary], -1)  # type: ignore[no-untyped-call]
    expected = own(latent[None, None], rotary[None, None])
    tolerance = 1e-4 if like.dtype == torch.float32 else 0.05
    for want, got in zip(expected, heads.expand(cached), strict=True):
        if want.shape[1:] != got.shape:
            return False
        if isinstance(want, FakeTensor) or want.is_meta:
            continue  # rehearsed: there are no values
        scale = float(want.float().abs().max()) + 1e-6
        if not float((want[0].float() - got.float()).abs().max()) <= tolerance * scale:
            return False
    return True


def take_latents(model: nn.Module, dtype: torch.dtype | None = None) -> list[LatentHeads]:
    """Put the latent vectors of all layers that have such before their attention function, instead
    of keys and values, in place. `dtype`: as for `latent_heads`."""
    found = []
    for module in list(model.modules()):
        heads = latent_heads(module, dtype)
        if heads is not None:
            module.kv_b_proj = heads
            object.__setattr__(module, "expand_kv", heads)  # before the class's method
            found.append(heads)
    return found


def given_heads(module: nn.Module) -> LatentHeads | None:
    """Those that `take_latents` gave to an attention layer."""
    found = vars(module).get("expand_kv")
    return found if isinstance(found, LatentHeads) else None
