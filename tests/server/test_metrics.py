"""What Prometheus scrapes: the names that routers and dashboards read, and their values."""

from prometheus_client.parser import text_string_to_metric_families

from tests.server.fakes import in_loop, say, serving, wait_until

NAMES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:num_preemptions_total",
    "vllm:mm_cache_queries_total",
    "vllm:mm_cache_hits_total",
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:request_time_per_output_token_seconds_count",
    "vllm:request_decode_time_seconds_count",
    "vllm:request_prompt_tokens_count",
    "vllm:request_generation_tokens_count",
    "tpu_vl:frames_encoded_total",
    "tpu_vl:patches_encoded_total",
    "tpu_vl:patch_padding_share",
    "tpu_vl:encoder_calls_total",
    "tpu_vl:compiles_after_ready_total",
    "tpu_vl:media_pool_usage",
    "tpu_vl:preprocess_time_seconds_count",
)


async def samples(app):
    text = (await app.http.get("/metrics")).text
    return {
        (sample.name, sample.labels.get("finished_reason")): sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@in_loop
async def test_every_name_is_there_with_its_labels():
    async with serving(say("a"), compiles_after_ready=lambda: 3) as app:
        await app.chat()
        found = await samples(app)
        names = {name for name, _ in found}
        assert [name for name in NAMES if name not in names] == []
        for sample in found.values():
            assert sample.labels["model_name"] == "tiny"
            assert sample.labels["engine"] == "0"
        assert found["tpu_vl:compiles_after_ready_total", None].value == 3
        cache = found["vllm:cache_config_info", None]
        assert (cache.labels["block_size"], cache.labels["num_gpu_blocks"]) == ("16", "256")
        assert found["vllm:kv_cache_usage_perc", None].value == 0.25


@in_loop
async def test_counts_follow_the_requests():
    async with serving(say("red circle")) as app:
        usage = (await app.chat()).json()["usage"]
        await app.chat(max_tokens=1)
        await app.chat({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})
        wait_until(lambda: not app.engine.open)
        found = await samples(app)
        tokens = found["vllm:generation_tokens_total", None].value
        assert tokens == usage["completion_tokens"] + 1
        assert found["vllm:prompt_tokens_total", None].value == 2 * usage["prompt_tokens"]
        assert found["vllm:request_success_total", "stop"].value == 1
        assert found["vllm:request_success_total", "length"].value == 1
        assert found["vllm:time_to_first_token_seconds_count", None].value == 2
        gaps = found["vllm:inter_token_latency_seconds_count", None].value
        assert gaps == usage["completion_tokens"] - 1
        assert found["vllm:num_requests_running", None].value == 0
        assert found["vllm:num_requests_waiting", None].value == 0
