"""Prometheus metrics: the names that routers and dashboards read, and this server's own."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tpu_vl.server.state import ServerState

_LABELS = ("model_name", "engine")
_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
_ITL_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5)
_REQUEST_S = (0.1, 0.3, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
_TOKENS = tuple(4**power for power in range(11))


class RequestTimes:
    """Times and counts of one choice, observed as it runs."""

    def __init__(self, metrics: "Metrics", arrived_s: float, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._arrived_s = arrived_s
        self._prompt_tokens = prompt_tokens
        self._first_s: float | None = None
        self._last_s = arrived_s
        self._num_tokens = 0

    def tokens(self, count: int, now_s: float) -> None:
        """Notes answer tokens that came together at `now_s` (`time.monotonic()`)."""
        if not count:
            return
        metrics = self._metrics
        if self._first_s is None:
            self._first_s = now_s
            metrics.ttft.observe(now_s - self._arrived_s)
        else:
            for _ in range(count):
                metrics.itl.observe((now_s - self._last_s) / count)
        self._last_s = now_s
        self._num_tokens += count
        metrics.generation_tokens.inc(count)

    def finish(self, reason: str) -> None:
        """Notes the end; `reason` is stop, length, abort or error."""
        metrics, now_s = self._metrics, time.monotonic()
        metrics.success(reason)
        if reason in ("stop", "length"):
            metrics.e2e.observe(now_s - self._arrived_s)
            metrics.request_prompt_tokens.observe(self._prompt_tokens)
            metrics.request_generation_tokens.observe(self._num_tokens)
            if self._first_s is not None:
                metrics.decode.observe(self._last_s - self._first_s)
                if self._num_tokens > 1:
                    gaps = self._num_tokens - 1
                    metrics.tpot.observe((self._last_s - self._first_s) / gaps)


class Metrics:
    """All metrics of one server, in a registry of its own.

    Args:
        model_name: value of the model_name label.
        state: gives the engine's newest statistics when they are read.
    """

    def __init__(self, model_name: str, state: ServerState) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._labels = (model_name, "0")
        self.num_preprocessing = 0
        self._success = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(*self._labels, reason)
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens taken in.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Answer tokens given.")
        self.ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _TTFT_S
        )
        self.itl = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of an answer.", _ITL_S
        )
        self.tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean token gap of a request.", _ITL_S
        )
        self.e2e = self._histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_S
        )
        self.decode = self._histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last.", _REQUEST_S
        )
        self.preprocess = self._histogram(
            "tpu_vl:preprocess_time_seconds",
            "From arrival to the engine: fetching, decoding, template.",
            _REQUEST_S,
        )
        self.request_prompt_tokens = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS
        )
        self.request_generation_tokens = self._histogram(
            "vllm:request_generation_tokens", "Answer tokens of a request.", _TOKENS
        )
        self.registry.register(_EngineCollector(self, state))

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def start(self, arrived_s: float, prompt_tokens: int) -> RequestTimes:
        """Begins the times of one choice."""
        self.prompt_tokens.inc(prompt_tokens)
        return RequestTimes(self, arrived_s, prompt_tokens)

    @contextmanager
    def preprocessing(self) -> Iterator[None]:
        """Counts a request as waiting while it is fetched, decoded and templated."""
        started_s = time.monotonic()
        self.num_preprocessing += 1
        try:
            yield
        except BaseException as error:
            self.success("error" if isinstance(error, Exception) else "abort")
            raise
        finally:
            self.num_preprocessing -= 1
            self.preprocess.observe(time.monotonic() - started_s)

    def success(self, reason: str) -> None:
        """Counts a request that ended."""
        self._success.labels(*self._labels, reason).inc()

    def labels(self) -> tuple[str, str]:
        """Values of the labels model_name and engine."""
        return self._labels

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=self.registry).labels(*self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, _LABELS, buckets=buckets, registry=self.registry).labels(
            *self._labels
        )


class _EngineCollector(Collector):
    """Reads the engine's statistics when they are scraped."""

    def __init__(self, metrics: Metrics, state: ServerState) -> None:
        self._metrics = metrics
        self._state = state

    def collect(self) -> Iterable[Metric]:
        model = self._state.model
        if model is None:
            return
        stats = model.client.stats
        patches, padded = stats.patches_encoded_total, stats.patches_padded_total
        gauges = {
            "vllm:num_requests_running": ("Requests with a slot.", stats.running),
            "vllm:num_requests_waiting": (
                "Requests without a slot, those in preprocessing included.",
                stats.waiting + self._metrics.num_preprocessing,
            ),
            "vllm:kv_cache_usage_perc": ("Share of KV pages in use, 0 to 1.", stats.kv_usage),
            "tpu_vl:media_pool_usage": ("Share of media pool rows in use.", stats.pool_usage),
            "tpu_vl:patch_padding_share": (
                "Share of the tower's computed rows that were padding.",
                padded / (patches + padded) if patches + padded else 0.0,
            ),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            gauge.add_metric(self._metrics.labels(), value)
            yield gauge
        cache = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Sizes of the KV cache.",
            labels=(*_LABELS, "block_size", "num_gpu_blocks"),
        )
        sizes = (str(model.page_size), str(model.num_pages))
        cache.add_metric((*self._metrics.labels(), *sizes), 1)
        yield cache
        counters = {
            "vllm:num_preemptions": ("Sequences recomputed later.", stats.preemptions_total),
            "vllm:mm_cache_queries": ("Media looked up.", stats.media_cache_queries_total),
            "vllm:mm_cache_hits": ("Media found encoded.", stats.media_cache_hits_total),
            "tpu_vl:engine_steps": ("Steps of the engine.", stats.steps_total),
            "tpu_vl:frames_encoded": ("Images and frames encoded.", stats.frames_encoded_total),
            "tpu_vl:patches_encoded": ("Patches encoded.", patches),
            "tpu_vl:patches_padded": ("Padding rows that the tower computed.", padded),
            "tpu_vl:encoder_calls": ("Runs of a tower program.", stats.encoder_calls_total),
            "tpu_vl:compiles_after_ready": (
                "Programs compiled since the server was ready; stays 0.",
                model.compiles_after_ready(),
            ),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            counter.add_metric(self._metrics.labels(), value)
            yield counter
