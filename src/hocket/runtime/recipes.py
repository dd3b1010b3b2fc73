"""Recipes: results of cheap operations that backward makes again instead of having them kept.

    forward    a = norm(x): a is saved by the three matmuls that read it, and by the norm itself
    kept       x, and one recipe in place of each saved a
    backward   the first that asks for a runs the recipe; all others get the same tensor

While a region of a layer runs (a norm, a feed-forward layer), a function mode writes down how each
result of a listed operation was made: the function, and its arguments, which are results as well,
or are kept. What autograd saves of these results is replaced by their recipe. Operations that are
not listed (matmuls, attention, dropout, everything in place) are left as they are, so that nothing
random, no collective and no matmul runs again. The output of a norm or gate is thus discarded
without a change of the code that saves it (as Megatron-Core's output-discarding checkpoints).

The operations run on the same numbers again, and give the same, to the last bit.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from hocket.spec.errors import ModelError

OPERATIONS = frozenset({
    "add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "pow",
    "rpow", "neg", "negative", "square", "sqrt", "rsqrt", "reciprocal", "exp", "sigmoid", "tanh",
    "relu", "silu", "gelu", "softplus", "leaky_relu", "elu", "mish", "hardtanh", "clamp", "clip",
    "clamp_min", "clamp_max", "mean", "var", "layer_norm", "rms_norm", "to", "float", "bfloat16",
    "half", "type", "type_as", "contiguous", "clone", "cat", "concat", "concatenate", "where",
    "new_empty",
})  # fmt: skip
"""Functions that are run again: of the same numbers they make the same, without a matmul."""

KEEPING_RESULT = frozenset({"sqrt", "rsqrt", "reciprocal", "exp", "sigmoid", "tanh", "relu"})
"""Those of them whose result is saved while they run."""


class Recipe:
    """How one tensor was made.

    Attributes:
        function: called with `args` and `kwargs`, in which saved tensors take the place of tensors
            that have recipes themselves.
        storage: the tensor's.
    """

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.function = function
        self.args, self.kwargs = args, kwargs
        self.users: weakref.WeakSet[Made] = weakref.WeakSet()
        self.version = 0

    @torch.no_grad()
    def run(self) -> None:
        """Give all users their tensor. Once: what it was made of is then freed."""
        args, kwargs = mapped((self.args, self.kwargs), _value)
        result: Tensor = self.function(*args, **kwargs)
        for user in self.users:
            user.value = result.as_strided(*user.place)
        self.args = self.kwargs = None


class Made:
    """In place of a saved tensor: a view of what a recipe makes.

    Attributes:
        place: its sizes, strides and offset.
        value: the tensor, from when it is first asked for until its users are freed.
    """

    def __init__(self, recipe: Recipe, tensor: Tensor) -> None:
        self.recipe = recipe
        self.place = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        self.value: Tensor | None = None
        recipe.users.add(self)

    def tensor(self) -> Tensor:
        """It, made if it is not there."""
        if self.value is None:
            self.recipe.run()
        assert self.value is not None
        return self.value


class _Leaf:
    """A tensor that a recipe starts from, as it was, and what is kept of it."""

    def __init__(self, tensor: Tensor, pack: Callable[[Tensor], Any], unpack: Any) -> None:
        # Of parameters themselves: their values may be elsewhere in between (ZeRO-3).
        self.own = isinstance(tensor, nn.Parameter)
        tensor = tensor if self.own else tensor.detach()
        self.kept = tensor if self.own else pack(tensor)
        self.unpack = unpack
        self.version = tensor._version

    def tensor(self) -> Tensor:
        found: Tensor = self.kept if self.own else self.unpack(self.kept)
        if not self.own and found is self.kept and found._version != self.version:
            raise ModelError(
                "a tensor that a recomputed module was given was written to in place after it had "
                "been read",
                hint="recompute=full",
            )
        return found


class KeptInput:
    """What is kept of an input of something that runs again with gradients."""

    def __init__(self, layer: LayerRecipes, tensor: Tensor) -> None:
        self.kept = layer.keep(tensor)
        self.requires_grad = tensor.requires_grad

    def tensor(self) -> Tensor:
        """The input, without what it came from."""
        return self.kept.tensor().detach().requires_grad_(self.requires_grad)


class _Running(threading.local):
    """Of this thread: the layer that runs, and whether its operations are written down."""

    layer: LayerRecipes | None = None
    writing: bool = False


_RUNNING = _Running()


class LayerRecipes:
    """The recipes of one forward of one layer."""

    def __init__(self) -> None:
        # Hooks around this layer (offload) get what has no recipe.
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self._pack, self._unpack = (_same, _same) if outer is None else outer
        self._recipes: dict[int, tuple[weakref.ref[Any], Recipe, torch.dtype]] = {}
        self._making: tuple[Recipe, set[int]] | None = None

    def recipe_of(self, tensor: Tensor) -> Recipe | None:
        """That of a tensor that was made by a listed operation and not written to since."""
        storage = tensor.untyped_storage()
        known = self._recipes.get(storage._cdata)
        if known is None or known[0]() is None:
            return None
        _, recipe, dtype = known
        return recipe if dtype == tensor.dtype and recipe.version == tensor._version else None

    def pack(self, tensor: Tensor) -> Any:
        """What is kept in place of a saved tensor."""
        recipe = self.recipe_of(tensor)
        if recipe is None and self._making is not None:
            made, given = self._making
            if tensor.untyped_storage()._cdata not in given:  # the result of what runs
                recipe = made
        return self._pack(tensor) if recipe is None else Made(recipe, tensor)

    def unpack(self, kept: Any) -> Tensor:
        """The tensor again."""
        found: Tensor = kept.tensor() if isinstance(kept, Made) else self._unpack(kept)
        return found

    def keep(self, tensor: Tensor) -> Made | _Leaf:
        """What a recipe keeps of a tensor that it reads."""
        recipe = self.recipe_of(tensor)
        if recipe is not None:
            return Made(recipe, tensor)
        return _Leaf(tensor, self._pack, self._unpack)

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any, result: bool) -> Any:
        """Call a function, and write down how its result was made.

        Args:
            result: whether it saves its result while it runs.
        """
        recipe = Recipe(function, *mapped((args, kwargs), self.keep))
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        if result:
            self._making = (recipe, given)
        try:
            out = function(*args, **kwargs)
        finally:
            self._making = None
        if isinstance(out, Tensor):
            storage = out.untyped_storage()
            if storage._cdata not in given:
                recipe.version = out._version
                known = (weakref.ref(storage), recipe, out.dtype)
                self._recipes[storage._cdata] = known
        return out

    def forget(self) -> None:
        """The forward is over: recipes of what autograd did not save are dropped, which would keep
        the tensors they start from until the layer's backward ends."""
        self._recipes.clear()

    def assign(self, target: Tensor, index: Any, value: Any) -> None:
        """Assign to a part of a tensor that was made by a listed operation, and write it down."""
        recipe = self.recipe_of(target)
        given = mapped((target, index, value), self.keep) if recipe is not None else None
        target[index] = value
        if given is not None:
            storage = target.untyped_storage()
            again = Recipe(_assigned, given, {})
            again.version = target._version
            self._recipes[storage._cdata] = (weakref.ref(storage), again, target.dtype)


def _assigned(target: Tensor, index: Any, value: Any) -> Tensor:
    target[index] = value
    return target


class _Writer(TorchFunctionMode):
    """Has the layer that runs write down its operations."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        layer = _RUNNING.layer
        if name == "__setitem__" and layer is not None and torch.is_grad_enabled():
            return layer.assign(*args)
        if name not in OPERATIONS or layer is None or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if "out" in kwargs or not any(True for _ in _tensors((args, kwargs))):
            return func(*args, **kwargs)
        return layer.run(func, args, kwargs, name in KEEPING_RESULT)


class LayerWithRecipes:
    """Stands for the `forward` of one layer some of whose operations are run again in backward.

    Attributes:
        inner: the layer's own forward.
    """

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner
        self.__wrapped__ = inner  # signatures are read off it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        layer = LayerRecipes()
        before, _RUNNING.layer = _RUNNING.layer, layer
        try:
            with saved_tensors_hooks(layer.pack, layer.unpack):
                return self.inner(*args, **kwargs)
        finally:
            _RUNNING.layer = before
            layer.forget()


class WrittenModule:
    """Stands for the `forward` of a module whose listed operations are run again."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner
        self.__wrapped__ = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _RUNNING.layer is None or _RUNNING.writing or not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        _RUNNING.writing = True
        try:
            with _Writer():
                return self.inner(*args, **kwargs)
        finally:
            _RUNNING.writing = False


class ProjectionAgain:
    """Stands for the `forward` of a linear layer that is run again (MLA's up-projections)."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner
        self.__wrapped__ = inner

    def __call__(self, x: Tensor) -> Any:
        layer = _RUNNING.layer
        if layer is None or not torch.is_grad_enabled():
            return self.inner(x)
        return layer.run(self.inner, (x,), {}, False)


@contextmanager
def nothing_written() -> Iterator[None]:
    """Within, no operation is written down: what runs here is run again as a whole, or not."""
    before, _RUNNING.layer = _RUNNING.layer, None
    try:
        yield
    finally:
        _RUNNING.layer = before


def running_layer() -> LayerRecipes | None:
    """That of this thread."""
    return _RUNNING.layer


def _same(kept: Any) -> Any:
    return kept


def _value(kept: Any) -> Any:
    return kept.tensor()


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """A tree of arguments with its tensors, or what was kept of them, changed."""
    if isinstance(tree, Tensor | Made | _Leaf | KeptInput):
        return change(tree)
    if type(tree) in (tuple, list):
        return type(tree)(mapped(each, change) for each in tree)
    if type(tree) is dict:
        return {key: mapped(each, change) for key, each in tree.items()}
    return tree


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for each in tree:
            yield from _tensors(each)
    elif isinstance(tree, dict):
        for each in tree.values():
            yield from _tensors(each)
