"""What the server knows: how far loading is, and the loaded model that answers."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tpu_vl.chat.template import ChatTemplate
from tpu_vl.chat.tokenizer import Tokenizer
from tpu_vl.config import MediaLimits, ProcessorConfig
from tpu_vl.engine.client import EngineClient
from tpu_vl.types import MediaKind


@dataclass(frozen=True, kw_only=True)
class Capability:
    """Which media the model is served with: the front end's only source.

    Args:
        modalities: () or a subset of ("image", "video").
        reason_by_modality: why one is not served, for the error message.
    """

    modalities: tuple[str, ...] = ()
    reason_by_modality: dict[str, str] = field(default_factory=dict)

    def reason_against(self, kind: MediaKind) -> str | None:
        """Why a kind of media is refused; None when it is served."""
        if kind in self.modalities:
            return None
        return self.reason_by_modality.get(kind, "the model reads text only")


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """All that the front end needs of a model that is ready.

    Args:
        root: hub id or folder that was loaded.
        tokenizer, template: the checkpoint's.
        capability: which media are served.
        processor: how pictures become patches; None in a text-only process.
        limits: what is accepted as media.
        client: the way to the engine.
        max_model_len: prompt plus answer, in tokens.
        vocab_size: ids that a logit bias or a stop may name.
        max_logit_bias: entries of a logit bias that the sampling program holds.
        max_stop_token_ids: stop ids that `min_tokens` can hold back.
        max_open_requests: answers that may run and wait at once, before new ones get 503.
        page_size, num_pages: of the KV cache, for /metrics.
        compiles_after_ready: programs compiled since the model was ready; must stay 0.
        close: ends the engine; called once, after the last request.
    """

    root: str
    tokenizer: Tokenizer
    template: ChatTemplate
    capability: Capability
    processor: ProcessorConfig | None
    limits: MediaLimits
    client: EngineClient
    max_model_len: int
    vocab_size: int
    max_logit_bias: int
    max_stop_token_ids: int
    max_open_requests: int
    page_size: int
    num_pages: int
    compiles_after_ready: Callable[[], int]
    close: Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far loading is.

    Args:
        phase: what is being done, such as "weights" or "programs".
        done, total: units of the phase; total 0 when unknown.
    """

    phase: str
    done: int = 0
    total: int = 0


class ServerState:
    """Loading progress, written by the loading thread and read by the event loop.

    Attributes:
        progress: the newest report.
        model: set once, when requests can be answered.
        failure: why loading ended without a model.
        draining: the server is ending; no new request is taken.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.progress = Progress(phase="starting")
        self.model: LoadedModel | None = None
        self.failure: BaseException | None = None
        self.draining = False

    def report(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Notes how far loading is; called from any thread."""
        with self._lock:
            self.progress = Progress(phase=phase, done=done, total=total)

    def ready(self, model: LoadedModel) -> None:
        """Opens the server for requests; called on the event loop, after `client.start`."""
        self.report("ready", 1, 1)
        self.model = model
