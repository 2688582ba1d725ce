"""The four dashboards: what each shows, and the queries.

Fleet-wide series come from every gateway alike: `max by`. A gauge is read with `last_over_time`,
because several gateways may answer behind one address in turns (docs/reference/metrics.md).
"""

from scripts.dashboards.grafana import Board, Panel, Row

_MODEL = 'model=~"$model"'
_CLASS = f'{_MODEL},compute_class=~"$compute_class"'
_SLICE = 'slice=~"$slice"'
_QUOTA = "tenant, kind, period, models"
_MODELS = "label_values(class:ledger_chips:max, model)"
_CLASSES = "label_values(class:ledger_chips:max, compute_class)"


def _quantiles(histogram: str, matchers: str, by: str = "model") -> dict[str, str]:
    """The middle and the tail, by legend."""
    rate = f"rate({histogram}_bucket{{{matchers}}}[$__rate_interval])"
    return {
        f"p{100 * share:g} {{{{{by}}}}}": (
            f"histogram_quantile({share:g}, sum by ({by}, le) ({rate}))"
        )
        for share in (0.5, 0.95, 0.99)
    }


def _last(metric: str, matchers: str, by: str, how: str = "max") -> str:
    return f"{how} by ({by}) (last_over_time({metric}{{{matchers}}}[1m]))"


_CHIPS = f"class:ledger_chips:max{{{_CLASS}}}"
_COST = f"class:cost_usd:rate5m{{{_CLASS}}}"
_TOKENS = f"class:output_tokens:rate5m{{{_CLASS}}}"

FLEET = Board(
    "slicewise-fleet",
    "Slicewise: fleet and cost",
    "Where the chips are, what they cost, what they give.",
    {"model": _MODELS, "compute_class": _CLASSES},
    (
        Row(
            "Now",
            (
                Panel(
                    "Chips held",
                    {"chips": f'sum(class:ledger_chips:max{{{_CLASS},state!="provisioning"}})'},
                    kind="stat",
                    width=6,
                ),
                Panel(
                    "Cost per hour",
                    {"USD/h": f"3600 * sum({_COST})"},
                    "currencyUSD",
                    "stat",
                    6,
                    "Absent for classes without usd_per_chip_hour.",
                ),
                Panel(
                    "Dollars per million output tokens",
                    {
                        "{{model}}": f"1e6 * sum by (model) ({_COST})"
                        f" / (sum by (model) ({_TOKENS}) > 0)"
                    },
                    "currencyUSD",
                    "stat",
                    6,
                    "Over five minutes; idle and starting chips included.",
                ),
                Panel(
                    "Share of paid chips that serve",
                    {
                        "{{model}}": "sum by (model) "
                        f'(class:ledger_chips:max{{{_CLASS},state="serving"}})'
                        " / sum by (model) "
                        f'(class:ledger_chips:max{{{_CLASS},state!="provisioning"}})'
                    },
                    "percentunit",
                    "stat",
                    6,
                ),
            ),
        ),
        Row(
            "Chips",
            (
                Panel(
                    "Chips by state",
                    {"{{state}}": f"sum by (state) ({_CHIPS})"},
                    is_stacked=True,
                ),
                Panel(
                    "Chips by compute class",
                    {"{{compute_class}}": f"sum by (compute_class) ({_CHIPS})"},
                    is_stacked=True,
                ),
                Panel(
                    "Slices lost in 30 minutes",
                    {
                        "{{compute_class}} {{cause}}": "class:slices_ended:increase30m"
                        '{compute_class=~"$compute_class"}'
                    },
                    text="`released` (scale-down, update, shutdown) and `adopted` are no losses.",
                ),
                Panel(
                    "Time in the present state",
                    {"{{slice}} {{state}}": f"topk(15, slice:in_state:seconds{{{_CLASS}}})"},
                    "s",
                    text="Without a slice: the replica that has waited longest for one.",
                ),
            ),
        ),
        Row(
            "Cost",
            (
                Panel(
                    "Dollars per hour by state",
                    {"{{state}}": f"3600 * sum by (state) ({_COST})"},
                    "currencyUSD",
                    is_stacked=True,
                ),
                Panel(
                    "Dollars per hour by compute class",
                    {"{{compute_class}}": f"3600 * sum by (compute_class) ({_COST})"},
                    "currencyUSD",
                    is_stacked=True,
                ),
                Panel(
                    "Output tokens per second",
                    {"{{model}} {{compute_class}}": _TOKENS},
                    is_stacked=True,
                ),
                Panel(
                    "Duty cycle by slice",
                    {
                        "{{slice}}": "slice:tpu_duty_cycle_ratio:avg"
                        '{compute_class=~"$compute_class|"}'
                    },
                    "percentunit",
                ),
            ),
        ),
        Row(
            "Tenants",
            (
                Panel(
                    "Quotas nearest to their limits",
                    {
                        "{{tenant}} {{kind}} {{period}} {{models}}": "topk(15, "
                        f"{_last('slicewise_tenant_quota_used', '', _QUOTA)}"
                        f" / {_last('slicewise_tenant_quota_limit', '', _QUOTA)})"
                    },
                    "percentunit",
                    text="Of all models: a quota may be on the sum of several.",
                ),
                Panel(
                    "Requests refused because of quotas",
                    {
                        "{{tenant}} {{kind}} {{reason}}": "sum by (tenant, kind, reason) "
                        "(rate(slicewise_tenant_quota_refusals_total[$__rate_interval]))"
                    },
                    "reqps",
                    text="`request_over_quota` alone is larger than all that its tenant may have.",
                ),
                Panel(
                    "Requests by tenant",
                    {
                        "{{tenant}}": "sum by (tenant) (rate(slicewise_admissions_total"
                        f"{{{_MODEL}}}[$__rate_interval]))"
                    },
                    "reqps",
                ),
                Panel(
                    "Since a gateway heard what others have counted",
                    {
                        "{{gateway}}": _last(
                            "slicewise_tenant_quota_answer_age_seconds", "", "gateway"
                        )
                    },
                    "s",
                    text="Without it a tenant may have its quota at each gateway once more.",
                ),
            ),
        ),
    ),
)

SERVICE = Board(
    "slicewise-model",
    "Slicewise: service level of a model",
    "What users of a model get, and which objective it misses.",
    {"model": _MODELS, "compute_class": _CLASSES},
    (
        Row(
            "Objectives",
            (
                Panel(
                    "Burn rate, one hour",
                    {"{{model}} {{slo}}": f"model:slo_burn_rate:1h{{{_MODEL}}}"},
                    text="1 uses the error budget up in exactly its period; 14.4 pages.",
                    thresholds={1: "orange", 14.4: "red"},
                ),
                Panel(
                    "Share of bad requests, five minutes",
                    {
                        "{{model}} {{slo}}": f"model:slo_bad:rate5m{{{_MODEL}}}"
                        f" / model:slo_all:rate5m{{{_MODEL}}}"
                    },
                    "percentunit",
                ),
            ),
        ),
        Row(
            "Latency",
            (
                Panel(
                    "Time to first token",
                    _quantiles("slicewise_time_to_first_token_seconds", _CLASS),
                    "s",
                ),
                Panel(
                    "Time per output token",
                    _quantiles("slicewise_time_per_output_token_seconds", _CLASS),
                    "s",
                ),
                Panel(
                    "Inter-token latency", _quantiles("slicewise_inter_token_seconds", _CLASS), "s"
                ),
                Panel(
                    "Whole request", _quantiles("slicewise_request_duration_seconds", _CLASS), "s"
                ),
                Panel(
                    "Wait for an engine", _quantiles("slicewise_queue_time_seconds", _CLASS), "s"
                ),
                Panel(
                    "Mean wait by class of service",
                    {
                        "{{model}} {{service_class}}": "sum by (model, service_class) "
                        f"(rate(slicewise_queue_time_seconds_sum{{{_CLASS}}}[$__rate_interval])) / "
                        "sum by (model, service_class) "
                        f"(rate(slicewise_queue_time_seconds_count{{{_CLASS}}}[$__rate_interval]))"
                    },
                    "s",
                ),
                Panel(
                    "Engine and gateway, p95",
                    {
                        "engine": "histogram_quantile(0.95, sum by (le) "
                        f"(rate(slicewise_engine_time_seconds_bucket{{{_CLASS}}}[$__rate_interval])))",
                        "gateway in": "histogram_quantile(0.95, sum by (le) "
                        f"(rate(slicewise_gateway_input_seconds_bucket{{{_CLASS}}}[$__rate_interval])))",
                        "gateway out": "histogram_quantile(0.95, sum by (le) "
                        f"(rate(slicewise_gateway_output_seconds_bucket{{{_CLASS}}}[$__rate_interval])))",
                    },
                    "s",
                ),
            ),
        ),
        Row(
            "Traffic",
            (
                Panel(
                    "Requests by result",
                    {
                        "{{model}} {{result}}": "sum by (model, result) "
                        f"(rate(slicewise_admissions_total{{{_MODEL}}}[$__rate_interval]))"
                    },
                    "reqps",
                ),
                Panel(
                    "Ends of sequences",
                    {
                        "{{model}} {{outcome}}": "sum by (model, outcome) "
                        f"(rate(slicewise_sequences_total{{{_MODEL}}}[$__rate_interval]))"
                    },
                ),
                Panel(
                    "Tokens per second",
                    {
                        "in": "sum(rate(slicewise_input_tokens_total"
                        f"{{{_CLASS}}}[$__rate_interval]))",
                        "of them cached": "sum(rate(slicewise_cached_input_tokens_total"
                        f"{{{_CLASS}}}[$__rate_interval]))",
                        "out": "sum(rate(slicewise_output_tokens_total"
                        f"{{{_CLASS}}}[$__rate_interval]))",
                    },
                ),
                Panel(
                    "In flight and waiting",
                    {
                        "in flight {{compute_class}}": _last(
                            "slicewise_sequences_in_flight", _CLASS, "compute_class", "sum"
                        ),
                        "waiting {{model}}": _last(
                            "slicewise_requests_waiting", _MODEL, "model", "sum"
                        ),
                    },
                ),
                Panel(
                    "Line by class of service",
                    {
                        "{{model}} {{service_class}}": _last(
                            "slicewise_line_sequences", _MODEL, "model, service_class", "sum"
                        ),
                        "{{model}} {{service_class}} of {{tenant}}": _last(
                            "slicewise_line_tenant_sequences",
                            _MODEL,
                            "model, service_class, tenant",
                            "sum",
                        ),
                        "{{model}} told to come back": _last(
                            "slicewise_promised_sequences", _MODEL, "model", "sum"
                        ),
                    },
                    text="Admitted sequences that wait for room, and refused ones that are due.",
                ),
                Panel(
                    "Prompt tokens in prefix caches, by forecast",
                    {
                        "{{model}} {{outcome}}": "sum by (model, outcome) "
                        f"(rate(slicewise_cache_forecast_tokens_total{{{_CLASS}}}"
                        "[$__rate_interval]))"
                    },
                    text="Tokens per second. found: expected there and found; missing: only"
                    " expected; unforeseen: found, and not expected.",
                ),
                Panel(
                    "Engines chosen, by reason",
                    {
                        "{{model}} {{reason}}": "sum by (model, reason) "
                        f"(rate(slicewise_dispatches_total{{{_CLASS}}}[$__rate_interval]))"
                    },
                    "reqps",
                    text="What decided where a sequence went. cached: another engine had no more"
                    " to do, but less of the prompt; spread: one more copy of a popular beginning;"
                    " least_to_do: another's line was longer; waited: for this engine, though"
                    " another had room; only_one: no other could have it.",
                ),
                Panel(
                    "Answers by status",
                    {
                        "{{status}}": "sum by (status) "
                        f"(rate(slicewise_http_responses_total{{{_MODEL}}}[$__rate_interval]))"
                    },
                    "reqps",
                ),
                Panel(
                    "Clients that left",
                    {
                        "{{model}}": "sum by (model) "
                        f"(rate(slicewise_cancellations_total{{{_MODEL}}}[$__rate_interval]))",
                        "{{model}}, ended for not reading": "sum by (model) "
                        f"(rate(slicewise_unread_answers_total{{{_MODEL}}}[$__rate_interval]))",
                    },
                    "reqps",
                ),
            ),
        ),
        Row(
            "Survival",
            (
                Panel(
                    "Resumes",
                    {
                        "{{compute_class}} {{cause}}": "sum by (compute_class, cause) "
                        f"(increase(slicewise_resumes_total{{{_CLASS}}}[5m]))"
                    },
                    text="Sequences that moved within five minutes, by the class they left.",
                ),
                Panel(
                    "Pause of a resumed stream",
                    _quantiles("slicewise_resume_stall_seconds", _CLASS),
                    "s",
                ),
                Panel(
                    "Links that ended",
                    {
                        "{{compute_class}} {{cause}}": "sum by (compute_class, cause) "
                        f"(increase(slicewise_link_losses_total{{{_CLASS}}}[5m]))"
                    },
                ),
                Panel(
                    "Engines linked",
                    {
                        "{{compute_class}} {{state}}": "max by (compute_class, state) "
                        f"(last_over_time(slicewise_links{{{_CLASS}}}[1m]))"
                    },
                    text="Of the gateway that has the most.",
                ),
            ),
        ),
        Row(
            "Gateways",
            (
                Panel(
                    "Tokens per chunk",
                    {
                        "{{gateway}}": "sum by (gateway) "
                        f"(rate(slicewise_output_tokens_total{{{_MODEL}}}[$__rate_interval])) / "
                        "sum by (gateway) "
                        f"(rate(slicewise_output_chunks_total{{{_MODEL}}}[$__rate_interval]))"
                    },
                    text="1 until a gateway is so busy that it joins tokens.",
                ),
                Panel(
                    "Longest turn of the loop",
                    {
                        "turn {{gateway}}": _last(
                            "slicewise_gateway_longest_turn_seconds", "", "gateway"
                        ),
                        "CPU time {{gateway}}": _last(
                            "slicewise_gateway_longest_turn_cpu_seconds", "", "gateway"
                        ),
                    },
                    "s",
                    text="Of gateways of all models. A turn far longer than its CPU time waited "
                    "for a core.",
                ),
            ),
        ),
    ),
)

SLICE = Board(
    "slicewise-slice",
    "Slicewise: a slice down to its chips",
    "One slice: its engine, hosts and chips. Absent chips are absent, not zero.",
    {
        "compute_class": "label_values(slice:in_state:seconds, compute_class)",
        "model": 'label_values(slice:in_state:seconds{compute_class=~"$compute_class"}, model)',
        "slice": "label_values(slice:in_state:seconds"
        '{compute_class=~"$compute_class",model=~"$model"}, slice)',
    },
    (
        Row(
            "Slice",
            (
                Panel(
                    "State and time in it",
                    {"{{slice}} {{state}}": f"slice:in_state:seconds{{{_SLICE}}}"},
                    "s",
                    "stat",
                    8,
                ),
                Panel(
                    "Chips expected, detected, reporting",
                    {
                        "{{node}} expected": f"tpu_chips_expected{{{_SLICE}}}",
                        "{{node}} detected": f"tpu_chips_detected{{{_SLICE}}}",
                        "{{node}} {{source}}": f"tpu_chips_reporting{{{_SLICE}}}",
                    },
                    kind="stat",
                    width=8,
                ),
                Panel(
                    "Chip-seconds by state",
                    {
                        "{{slice}} {{state}}": "max by (slice, state) (rate("
                        f"slicewise_ledger_slice_chip_seconds_total{{{_SLICE}}}[$__rate_interval]))"
                    },
                    width=8,
                    is_stacked=True,
                ),
            ),
        ),
        Row(
            "Engine",
            (
                Panel(
                    "Requests of the engine",
                    {
                        "{{slice}} running": _last("slicewise_engine_running", _SLICE, "slice"),
                        "{{slice}} waiting": _last("slicewise_engine_waiting", _SLICE, "slice"),
                    },
                ),
                Panel(
                    "KV cache in use",
                    {"{{slice}}": _last("slicewise_engine_kv_usage_ratio", _SLICE, "slice")},
                    "percentunit",
                ),
            ),
        ),
        Row(
            "Chips",
            (
                Panel(
                    "Duty cycle",
                    {"{{worker}}/{{chip}}{{core}}": f"tpu_duty_cycle_ratio{{{_SLICE}}}"},
                    "percentunit",
                ),
                Panel(
                    "TensorCore utilisation",
                    {"{{worker}}/{{chip}}": f"tpu_tensorcore_utilization_ratio{{{_SLICE}}}"},
                    "percentunit",
                ),
                Panel(
                    "HBM in use",
                    {
                        "{{worker}}/{{chip}}{{core}}": f"tpu_hbm_used_bytes{{{_SLICE}}}"
                        f" / tpu_hbm_capacity_bytes{{{_SLICE}}}"
                    },
                    "percentunit",
                    text="vLLM takes its share at the start and keeps it.",
                    thresholds={0.98: "red"},
                ),
                Panel(
                    "HBM bandwidth",
                    {
                        "{{worker}}/{{chip}}{{core}}": "tpu_hbm_bandwidth_utilization_ratio"
                        f"{{{_SLICE}}}"
                    },
                    "percentunit",
                ),
                Panel(
                    "Programs queued and running",
                    {"{{worker}}/{{chip}} {{core_type}}": f"tpu_hlo_queue_length{{{_SLICE}}}"},
                ),
                Panel(
                    "Program time",
                    _quantiles("tpu_hlo_execution_seconds", _SLICE, "slice"),
                    "s",
                ),
                Panel(
                    "Time since a program ran",
                    {"{{worker}}/{{chip}}": f"tpu_tensorcore_idle_seconds{{{_SLICE}}}"},
                    "s",
                ),
                Panel(
                    "Throttling",
                    {"{{worker}}/{{chip}}": f"tpu_throttle_ratio{{{_SLICE}}}"},
                    "percentunit",
                    thresholds={0.1: "red"},
                ),
                Panel(
                    "ICI links that are not healthy",
                    {
                        "{{node}} {{tray}}/{{tray_chip}} {{port}}": "max by "
                        f"(node, tray, tray_chip, port) (tpu_ici_link_health_score{{{_SLICE}}})"
                    },
                    text="0 healthy, 1 to 5 transient, 6 to 9 persistent, 10 unusable.",
                    thresholds={6: "red"},
                ),
                Panel(
                    "Chips by all their names",
                    {"": f"tpu_chip_info{{{_SLICE}}}"},
                    kind="table",
                ),
            ),
        ),
        Row(
            "Exporter",
            (
                Panel(
                    "Collectors",
                    {
                        "{{node}} {{collector}} {{target}}": "tpu_scrape_collector_success"
                        f"{{{_SLICE}}}"
                    },
                    kind="stat",
                    text="1: answered completely. libtpu is 0 while no workload holds the chips.",
                ),
                Panel(
                    "Errors by code, five minutes",
                    {
                        "{{node}} {{collector}} {{code}}": "sum by (node, collector, code) "
                        f"(increase(tpu_scrape_collector_errors_total{{{_SLICE}}}[5m]))"
                    },
                ),
                Panel(
                    "Time of a scrape by collector",
                    {
                        "{{node}} {{collector}}": "tpu_scrape_collector_duration_seconds"
                        f"{{{_SLICE}}}"
                    },
                    "s",
                ),
                Panel(
                    "Runtime uptime",
                    {"{{node}}": f"tpu_runtime_uptime_seconds{{{_SLICE}}}"},
                    "s",
                ),
            ),
        ),
    ),
)

_PLANNED = 'model=~"$model",compute_class=~"$compute_class"'

AUTOSCALER = Board(
    "slicewise-autoscaler",
    "Slicewise: autoscaler decisions",
    "What the load requires, what is planned, what there is. The reasons are on /fleet.",
    {
        "model": "label_values(slicewise_plan_target_slices, model)",
        "compute_class": "label_values(slicewise_plan_target_slices, compute_class)",
    },
    (
        Row(
            "Plan",
            (
                Panel(
                    "Demand, plan and fleet",
                    {
                        "demand {{model}}": _last("slicewise_plan_demand_slices", _MODEL, "model"),
                        "planned {{model}}": "sum by (model) ("
                        + _last("slicewise_plan_target_slices", _PLANNED, "model, compute_class")
                        + ")",
                        "ready {{model}}": f"model:slices_ready:count{{{_MODEL}}}",
                    },
                    text="Slices. Demand is what the load requires before asking what exists.",
                ),
                Panel(
                    "Slices planned by compute class",
                    {
                        "{{model}} {{compute_class}}": _last(
                            "slicewise_plan_target_slices", _PLANNED, "model, compute_class"
                        )
                    },
                    is_stacked=True,
                ),
                Panel(
                    "Slices refused by compute class",
                    {
                        "{{model}} {{compute_class}}": _last(
                            "slicewise_plan_refused_slices", _MODEL, "model, compute_class"
                        )
                    },
                    text="Wanted and not planned; without a class: of all of them.",
                ),
                Panel(
                    "Changes of targets per hour",
                    {
                        "{{model}} {{compute_class}}": "max by (model, compute_class) (changes("
                        f"slicewise_plan_target_slices{{{_PLANNED}}}[1h]))"
                    },
                ),
            ),
        ),
        Row(
            "Slices",
            (
                Panel(
                    "Slices by state",
                    {
                        "{{state}}": "count by (state) "
                        f'(slice:in_state:seconds{{{_CLASS},slice!=""}})'
                    },
                    is_stacked=True,
                ),
                Panel(
                    "Longest wait for a slice",
                    {
                        "{{model}} {{compute_class}}": "slice:in_state:seconds"
                        f'{{{_CLASS},state=~"requested|provisioning"}}'
                    },
                    "s",
                ),
                Panel(
                    "Requests that wait",
                    {"{{model}}": _last("slicewise_requests_waiting", _MODEL, "model", "sum")},
                ),
                Panel(
                    "Next slice expected in",
                    {
                        "{{model}}": _last(
                            "slicewise_plan_next_slice_time_seconds", _MODEL, "model"
                        )
                        + " - time()"
                    },
                    "s",
                    text="Absent while none is on its way.",
                ),
            ),
        ),
        Row(
            "Health of the policy",
            (
                Panel(
                    "Age of the plan",
                    {
                        "age": "time() - max(last_over_time("
                        "slicewise_plan_written_time_seconds[1m]))"
                    },
                    "s",
                    "stat",
                    6,
                    thresholds={60: "red"},
                ),
                Panel(
                    "Since the last change",
                    {
                        "{{model}}": "time() - "
                        + _last("slicewise_plan_changed_time_seconds", _MODEL, "model")
                    },
                    "s",
                    "stat",
                    6,
                ),
                Panel(
                    "Alerts of the policy",
                    {"{{model}}": "max by (model) (last_over_time(slicewise_plan_alerts[1m]))"},
                    kind="stat",
                    width=6,
                    thresholds={1: "red"},
                ),
                Panel(
                    "Failed decisions, one hour",
                    {
                        "{{model}}": "max by (model) "
                        f"(increase(slicewise_plan_failures_total{{{_MODEL}}}[1h]))"
                    },
                    kind="stat",
                    width=6,
                    thresholds={1: "red"},
                ),
            ),
        ),
    ),
)

BOARDS = {
    "fleet": FLEET,
    "model": SERVICE,
    "slice": SLICE,
    "autoscaler": AUTOSCALER,
}
