"""Chat: one conversation with a model, turn by turn, by the engine that serves."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Self

from hocket.jobs.generate import prepared
from hocket.jobs.serving.llm import LLM, Completion, OnText
from hocket.spec.errors import ModelError, OptionError

if TYPE_CHECKING:
    from hocket.launch import Launcher
    from hocket.spec.layout import Layout


class Chat:
    """A conversation: what was said so far goes into the model's chat template with every turn, and
    the prefix cache keeps it. Close it, or use it as a context.

    Args:
        model: a Hugging Face directory or a run folder; it must hold weights and a tokenizer.
        layout: of tp and pp.
        max_new_tokens: maximum number of tokens per answer; fewer where the context ends.
        temperature, top_k, top_p, seed: how tokens are chosen.
        chat_template_file: as of `hocket serve`.
        launcher: a warm one to use. None: one is started.
        **options: as of `hocket.generate`.

    Attributes:
        messages: of the conversation, each with `role` and `content`.

    Raises:
        HocketError: what the caller can mend, before any rank starts wherever possible.
    """

    def __init__(
        self,
        model: str,
        *,
        layout: str | Layout = "dp1",
        max_new_tokens: int = 1024,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        chat_template_file: str | None = None,
        launcher: Launcher | None = None,
        **options: Any,
    ) -> None:
        from hocket.jobs.serving.start import chat_templates
        from hocket.serving.request import SamplingParams

        self.messages: list[dict[str, str]] = []
        self._max_new_tokens = max_new_tokens
        self._sampling: dict[str, Any] = {
            "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed,
        }  # fmt: skip
        SamplingParams(max_new_tokens=max_new_tokens, **self._sampling)  # before ranks start
        _, server = prepared(
            model, layout, {"seed": seed, **options},
            max_num_seqs=1, chat_template_file=chat_template_file,
        )  # fmt: skip
        self._stack = contextlib.ExitStack()
        try:
            templates = chat_templates(server, self._stack)
            if templates is None:
                raise ModelError(
                    f"{server.source.name} has no chat template",
                    hint="--chat-template-file chatml",
                )
            self._templates = templates
            self._llm = self._stack.enter_context(LLM.of(server, launcher))
        except BaseException:
            self.close()
            raise

    def ask(self, text: str, on_text: OnText | None = None) -> Completion:
        """The answer to a message of the user. A turn that fails or is interrupted is dropped.

        Args:
            text: the message.
            on_text: as of `LLM.generate`.

        Raises:
            OptionError: the conversation fills the model's context.
            HocketError: the template rejects the conversation, or the ranks died.
        """
        from hocket.serving.http.settings import HttpSettings
        from hocket.serving.request import SamplingParams

        messages = [*self.messages, {"role": "user", "content": text}]
        written = self._templates.render(messages, most=HttpSettings.max_rendered)
        ids = self._llm.words.encode(written, special=False)
        longest = self._llm.max_model_len
        if len(ids) >= longest:
            raise OptionError(
                f"the conversation has {len(ids)} tokens with this message; the model's context "
                f"has {longest}",
                hint="/reset begins a new conversation",
            )
        most = min(self._max_new_tokens, longest - len(ids))
        sampling = SamplingParams(max_new_tokens=most, **self._sampling)
        (found,) = self._llm.generate([ids], sampling, on_text=on_text, progress=False)
        self.messages = [*messages, {"role": "assistant", "content": found.text}]
        return found

    def reset(self) -> None:
        """Begin a new conversation."""
        self.messages = []

    def close(self) -> None:
        """End the ranks. May be called twice."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
