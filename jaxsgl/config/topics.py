"""The flags of `jaxsgl serve` by what they are about: the sections of `--help`, and the topics of `--help TOPIC`.

A new flag needs a place here: the parser can't be made without.
"""

from __future__ import annotations

from typing import NamedTuple


class Topic(NamedTuple):
    """A section of the help: its title, and the fields whose flags it shows."""

    title: str
    fields: tuple[str, ...]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


TOPICS = {
    "model": Topic(
        "the model and its name",
        _words("model revision served_model_name dtype quantization weight_only load_format weight_version"
               " chat_template sampling_defaults tool_call_parser reasoning_parser free_tool_calls"
               " trust_request_chat_template split_special_tokens grammar_backend random_seed"),
    ),
    "memory": Topic(
        "context, KV cache and memory",
        _words("context_length max_total_tokens mem_fraction_static snapshot_share kv_cache_dtype page_size"
               " disable_radix_cache enable_hierarchical_cache host_kv_gib host_kv_write_policy host_kv_load_timeout_s"
               " kv_file enable_weights_cpu_backup"),
    ),
    "scheduling": Topic(
        "which requests run when (docs/scheduling.md)",
        _words("max_running_requests chunked_prefill_size max_prefill_tokens prefill_max_requests schedule_policy"
               " schedule_conservativeness enable_mixed_chunk decode_first max_itl_ms decode_steps"
               " disable_overlap_schedule enable_priority_scheduling schedule_low_priority_values_first"
               " priority_scheduling_preemption_threshold max_queued_requests max_queued_tokens grammar_timeout"
               " queue_timeout_s running_timeout_s"),
    ),
    "devices": Topic(
        "devices, replicas, kernels and compiled programs",
        _words("tp ep dp_size device_ids attention_backend kernels skip_kernel_test"
               " enable_deterministic_inference decode_buckets extend_buckets"
               " auto_buckets compilation_cache_dir"),
    ),
    "speculation": Topic(
        "drafts of tokens (docs/speculation.md)",
        _words("speculative_algorithm speculative_num_draft_tokens speculative_ngram_min_match_window_size"
               " speculative_ngram_max_match_window_size speculative_suffix_cache_mib"
               " speculative_draft_model_path"),
    ),
    "lora": Topic(
        "LoRA adapters (docs/lora.md)",
        _words("enable_lora lora_paths max_loras_per_batch max_lora_rank lora_target_modules max_loaded_loras lora_root"
               " weights_root"),
    ),
    "embeddings": Topic(
        "embeddings, scores and states (docs/embeddings.md)",
        _words("is_embedding enable_embeddings matryoshka enable_return_hidden_states enable_return_routed_experts"),
    ),
    "media": Topic(
        "pictures and videos (docs/multimodal.md)",
        _words("language_only mm_enable_dp_encoder mm_pool_tokens mm_host_mib mm_max_patches allowed_media_domains"
               " media_max_bytes media_max_pixels media_max_decode_bytes media_max_cpu_s media_timeout_s mm_hash_ids"),
    ),
    "network": Topic(
        "addresses, keys and limits of clients (docs/security.md)",
        _words("host port grpc_port tokenizer_worker_num api_key api_key_file admin_api_key allowed_hosts"
               " allowed_origins allow_get_control ssl_certfile ssl_keyfile max_connections max_request_bytes"
               " request_timeout_s drain_s responses_store batch_dir"),
    ),
    "operations": Topic(
        "logs, profiles and what happens in trouble (docs/operations.md)",
        _words("log_level log_format access_log log_requests otlp_traces_endpoint watchdog_s keep_stuck_server"
               " profile_dir profile_max_s profile_max_mb check_every_step"),
    ),
    "scale-out": Topic(
        "several hosts; prefill and decode on servers of their own (docs/scale-out.md)",
        _words("nnodes node_rank dist_init_addr dist_secret_file dist_timeout disaggregation_mode"
               " disaggregation_transfer_backend disaggregation_bootstrap_port disaggregation_host"
               " disaggregation_prefill_hosts disaggregation_secret_file disaggregation_staging_mib"
               " disaggregation_bootstrap_timeout_s disaggregation_peer_timeout_s"),
    ),
}  # fmt: skip
