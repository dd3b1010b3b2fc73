"""The reference of `hocket check --serve`: plain transformers, in a process of its own.

    prepare   writes a model with random weights to a folder, as transformers saves it
    compare   loads a folder with `AutoModelForCausalLM.from_pretrained` and compares a server's
              answers with its plain forward, one sequence at a time, without a cache

A greedy answer is checked by teacher forcing: the forward of prompt and answer gives, at each
position, the log-probabilities of the token after what the server itself had chosen so far. If each
of its tokens has the largest one, the answer is the reference's greedy answer, by induction.

Legend: S tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.spec.errors import HocketError
from hocket.spec.served_check import (
    COMPARISONS,
    NOISE,
    ServedCheck,
    ServedComparison,
    equal_limit,
)

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.launch import RankContext

# --- random weights --------------------------------------------------------------------------


def prepare_model(context: RankContext, payload: dict[str, Any]) -> None:
    """Write a model with random weights.

    Payload: `folder` to write to, `config`, `code` (a directory or None), `proxy`: shrink the
    configuration to the tiny proxy model of its class, `switches`: values of the configuration of
    which those are taken that the class can be built with, `seed`. Emits `{"event": "prepared",
    "config", "longest", "parameters", "switches"}`: `longest` is the longest sequence that the
    server accepts for this configuration, or None; or `{"event": "prepared", "rejected" or
    "crashed": why}`.
    """
    from hocket.models.failure import raise_if_exhausted

    try:
        said = _prepare(payload)
    except HocketError as error:
        said = {"rejected": error.message}
    except Exception as error:  # transformers fails in many ways on configurations of its own
        raise_if_exhausted(error)
        said = {"crashed": f"{type(error).__name__}: {error}"}
    context.emit({"event": "prepared", **said})


def _prepare(payload: dict[str, Any]) -> dict[str, Any]:
    import torch

    from hocket.models import skeleton
    from hocket.models.plain import save_plain
    from hocket.models.proxy import spread_weights, switched_proxy
    from hocket.serving.engine.refusal import longest_sequence

    code = Path(payload["code"]) if payload.get("code") else None
    config = skeleton.config_of(payload["config"], dropout=0.0, code=code)
    model: Any
    switches: dict[str, Any] = {}
    if payload["proxy"]:
        proxy, switches = switched_proxy(payload["config"], payload.get("switches") or {})
        config, model = proxy.config, proxy.build(seed=payload["seed"])
    else:
        model = skeleton.build_skeleton(config, device="cpu", dropout=0.0, code=code).eval()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(payload["seed"])
            for parameter in model.parameters():
                parameter.normal_(std=0.02)
            model.initialize_weights()
            model.tie_weights()
    spread_weights(model, payload["seed"])
    folder = Path(payload["folder"])
    save_plain(model, folder)
    if code is not None:
        for file in code.glob("*.py"):
            shutil.copy(file, folder / file.name)
        values = {**config.to_dict(), "auto_map": payload["config"]["auto_map"]}
        (folder / "config.json").write_text(json.dumps(values, default=str))
    return {
        "config": json.loads((folder / "config.json").read_text()),
        "longest": longest_sequence(config),
        "parameters": sum(p.numel() for p in model.parameters()),
        "switches": switches,
    }


# --- the comparison --------------------------------------------------------------------------


def compare_answers(context: RankContext, payload: dict[str, Any]) -> None:
    """Compare answers with plain transformers.

    Payload: `folder` of the model, `trust_remote_code`, `answers`: a file of {layout: a list of
    answers} (`jobs.serving.check`), `generate`: compare with `generate` too, `columns`: of weights
    in 8 bits (`ranks.eight_bits`), or None, `cache`: whether that is in 8 bits. Emits
    `{"event": "compared", "layout", "report"}` for each layout, or `{"event": "compared",
    "crashed": why}`.
    """
    from hocket.models.failure import raise_if_exhausted

    served = json.loads(Path(payload["answers"]).read_text())
    try:
        columns, cache = payload.get("columns"), bool(payload.get("cache"))
        folder, trusted = payload["folder"], payload["trust_remote_code"]
        reference = _Reference(folder, trusted)
        if columns is not None or cache:
            reference = _EightBitReference(folder, trusted, columns or {}, cache=cache)
        reports = reference.reports(served, generate=payload["generate"])
    except Exception as error:  # of transformers itself: there is nothing to compare with
        raise_if_exhausted(error)
        context.emit({"event": "compared", "crashed": f"{type(error).__name__}: {error}"})
        return
    for report in reports:
        context.emit({"event": "compared", "layout": report.layout, "report": report.to_json()})


class _Reference:
    """The plain model, and the log-probabilities of sequences that it was asked for."""

    eight_bits = 0.0

    def __init__(self, folder: str, trust_remote_code: bool) -> None:
        from hocket.models.plain import PlainModel

        self.model = PlainModel(folder, trust_remote_code=trust_remote_code)
        self.known: dict[tuple[int, ...], Tensor] = {}
        self.apart: dict[tuple[int, ...], float] = {}  # fp32 from fp64, once that was computed
        self.scale = 0.0

    def logprobs(self, tokens: tuple[int, ...]) -> Tensor:
        """[S, V] in fp64: at each position, of the token that follows."""
        if tokens not in self.known:
            logits = self._logits(tokens)
            self.scale = max(self.scale, float(logits.abs().max()))
            self.known[tokens] = logits.double().log_softmax(-1)
        return self.known[tokens]

    def _logits(self, tokens: tuple[int, ...]) -> Tensor:
        return self.model.logits(tokens)

    def _generate(self, prompt: list[int], count: int) -> list[int]:
        return self.model.generate(prompt, count)

    def rounding(self) -> float:
        """The largest difference of a log-probability from what the model computes in fp64; 0 where
        its code fails in fp64. Ends what the model can be used for."""
        from hocket.training.in_fp64 import stay_in_fp64

        try:
            stay_in_fp64(self.model.to_fp64())  # scans and routers too
            for tokens, known in self.known.items():
                exact = self.model.logits(tokens).double().log_softmax(-1)
                self.apart[tokens] = float((exact - known).abs().max())
            return max(self.apart.values())
        except Exception:  # a class may make fp32 tensors of its own
            return 0.0

    def reports(
        self, served: dict[str, list[dict[str, Any]]], *, generate: bool
    ) -> list[ServedCheck]:
        """The report of each layout's answers."""
        for answer in itertools.chain.from_iterable(served.values()):
            self.logprobs(_tokens(answer))
        alone = [a for a in next(iter(served.values())) if a["phase"] == "alone"]
        made = self._generated(alone) if generate else {}
        found = [self._report(layout, answers, made) for layout, answers in served.items()]
        if all(report.ok for report in found):
            return found
        every = self.rounding()
        own = {
            layout: max(self.apart.get(_tokens(answer), every) for answer in answers)
            for layout, answers in served.items()
        }
        return [self._report(layout, served[layout], made, own[layout]) for layout in served]

    def _report(
        self,
        layout: str,
        answers: list[dict[str, Any]],
        made: dict[tuple[int, ...], list[int] | str],
        rounding: float = 0.0,
    ) -> ServedCheck:
        limit = self.eight_bits or equal_limit(self.scale, rounding)
        rows = {name: _Row(name, limit) for name in COMPARISONS}
        for answer in answers:
            whole = self.logprobs(_tokens(answer))
            _answer(rows, answer, whole)
            expected = made.get(tuple(answer["prompt"]))
            if answer["phase"] == "alone" and expected is not None:
                _generated(rows["generate"], answer, whole, expected)
        found = tuple(row.comparison() for row in rows.values() if row.seen)
        every = sorted(off for row in rows.values() for off in row.differences)
        return ServedCheck(
            layout=layout, scale=self.scale, comparisons=found, rounding=rounding,
            eight_bits=self.eight_bits,
            median=every[len(every) // 2] if self.eight_bits and every else 0.0,
        )  # fmt: skip

    def _generated(self, answers: list[dict[str, Any]]) -> dict[tuple[int, ...], list[int] | str]:
        """What `generate` continues each prompt with, or why it fails: some classes have a forward
        and no working `generate`."""
        from hocket.models.failure import raise_if_exhausted

        found: dict[tuple[int, ...], list[int] | str] = {}
        for answer in answers:
            prompt = answer["prompt"]
            try:
                found[tuple(prompt)] = self._generate(prompt, answer["wanted"])
            except Exception as error:
                raise_if_exhausted(error)
                found[tuple(prompt)] = f"{type(error).__name__}: {error}"
        return found


def _tokens(answer: dict[str, Any]) -> tuple[int, ...]:
    return (*answer["prompt"], *answer["tokens"])


class _EightBitReference(_Reference):
    """The same, whose matmuls by some weights are those of 8-bit floats, or whose cache is."""

    def __init__(
        self, folder: str, trust_remote_code: bool, columns: dict[str, Any], *, cache: bool
    ) -> None:
        from hocket.models.plain import PlainModel
        from hocket.models.rounded import RoundedCache, RoundedProducts

        super().__init__(folder, trust_remote_code)
        self.exact = PlainModel(folder, trust_remote_code=trust_remote_code)
        self.rounded = RoundedProducts(self.model.multiplied_one_by_one(), columns)
        if cache:
            self.model.new_cache = lambda config: RoundedCache(config, self.rounded)

    def logprobs(self, tokens: tuple[int, ...]) -> Tensor:
        if tokens not in self.known:
            found = super().logprobs(tokens)
            exact = self.exact.logits(tokens).double().log_softmax(-1)
            self.eight_bits = max(self.eight_bits, float((exact - found).abs().max()))
        return self.known[tokens]

    def _logits(self, tokens: tuple[int, ...]) -> Tensor:
        with self.rounded:
            found = self.model.logits(tokens)
        if self.rounded.missing:
            raise ValueError(f"its code does not multiply by {min(self.rounded.missing)}")
        return found

    def _generate(self, prompt: list[int], count: int) -> list[int]:
        with self.rounded:
            return self.model.generate(prompt, count)

    def rounding(self) -> float:
        """The median difference of a position's log-probabilities when `NOISE` is added to what is
        rounded."""
        import torch

        self.rounded.noise = NOISE
        off = [
            (self._logits(tokens).double().log_softmax(-1) - known).abs().amax(-1)
            for tokens, known in self.known.items()
        ]
        self.rounded.noise = 0.0
        return float(torch.cat(off).median())


def _generated(row: _Row, answer: dict[str, Any], whole: Tensor, expected: list[int] | str) -> None:
    """Compare tokens with those of `generate`, up to where two tokens are equally likely."""
    row.seen = True
    if isinstance(expected, str):
        row.note = f"generate of transformers fails: {expected}"
        return
    for at, (token, want) in enumerate(zip(answer["tokens"], expected, strict=False)):
        row.tokens += 1
        if token == want:
            continue
        here = whole[len(answer["prompt"]) - 1 + at]
        if float(here.max() - here[want]) > 2 * row.limit:
            row.note = "generate of transformers differs from its own forward"
        elif float(here.max() - here[token]) > 2 * row.limit:
            row.fail(f"{_where(answer, at)}: token {token}, generate gives {want}")
        break


class _Row:
    """One comparison while it grows."""

    def __init__(self, name: str, limit: float) -> None:
        self.name, self.limit = name, limit
        self.positions = self.tokens = 0
        self.differences: list[float] = []
        self.failure = self.note = ""
        self.seen = False

    def fail(self, text: str) -> None:
        """Keep the first failure."""
        self.failure = self.failure or text

    def comparison(self) -> ServedComparison:
        return ServedComparison(
            name=self.name, positions=self.positions, tokens=self.tokens,
            difference=max(self.differences, default=0.0), failure=self.failure, note=self.note,
        )  # fmt: skip

    def position(self, where: str, entry: list[Any], expected: Tensor) -> None:
        """One position's `entry` (`TokenLogprobs.to_json`) against log-probabilities [V]."""
        token, logprob, top = entry
        self.positions += 1
        pairs = [(f"token {token}", logprob, float(expected[token]))]
        pairs += [(f"token {other}", value, float(expected[other])) for other, value in top]
        largest = expected.topk(len(top)).values.tolist()
        pairs += [
            (f"number {rank + 1} by likelihood, token {other}", value, want)
            for rank, ((other, value), want) in enumerate(zip(top, largest, strict=True))
        ]
        largest_off = 0.0
        for what, value, want in pairs:
            off = abs(value - want)
            if not math.isfinite(off):
                off = math.inf
            largest_off = max(largest_off, off)
            if off > self.limit:
                self.fail(
                    f"{where}: the log-probability of {what} is {value:.6g}, transformers' is "
                    f"{want:.6g} (allowed: {self.limit:.1e})"
                )
        self.differences.append(largest_off)


def _answer(rows: dict[str, _Row], answer: dict[str, Any], whole: Tensor) -> None:
    """Compare one answer; of one that was asked for alone, each part under its own name."""
    prompt, tokens, phase = answer["prompt"], answer["tokens"], answer["phase"]
    alone = phase == "alone"
    first = rows["chunked prefill" if answer["chunked"] else "prefill"] if alone else rows[phase]
    later = rows["decode"] if alone else rows[phase]
    first.seen = later.seen = True
    if answer["failure"]:
        first.fail(answer["failure"])
    prompt_logprobs = answer["prompt_logprobs"]
    if prompt_logprobs is not None:
        if len(prompt_logprobs) != len(prompt) - 1:
            first.fail(
                f"{_where(answer)}: {len(prompt_logprobs)} log-probabilities of "
                f"{len(prompt) - 1} prompt tokens"
            )
        for at, entry in enumerate(prompt_logprobs[: len(prompt) - 1]):
            where = f"{_where(answer)}, prompt position {at + 1}"
            if entry[0] != prompt[at + 1]:
                first.fail(f"{where}: token {entry[0]}, the prompt has {prompt[at + 1]}")
            first.position(where, entry, whole[at])
    if len(tokens) != answer["wanted"] or len(answer["logprobs"]) != len(tokens):
        first.fail(
            f"{_where(answer)}: {len(tokens)} tokens and {len(answer['logprobs'])} "
            f"log-probabilities; {answer['wanted']} were asked for"
        )
    for at, (token, entry) in enumerate(zip(tokens, answer["logprobs"], strict=False)):
        row = later if at else first
        where, here = _where(answer, at), whole[len(prompt) - 1 + at]
        row.tokens += 1
        row.position(where, entry, here)
        missing = float(here.max() - here[token])
        if not missing <= 2 * row.limit:
            row.fail(
                f"{where}: token {token} ({float(here[token]):.6g}), transformers takes "
                f"{int(here.argmax())} ({float(here.max()):.6g})"
            )


def _where(answer: dict[str, Any], at: int | None = None) -> str:
    text = f"prompt of {len(answer['prompt'])} tokens"
    return text if at is None else f"{text}, generated token {at + 1}"
