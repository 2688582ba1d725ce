"""Writes the verdict of a run for a reader, as text and as one HTML file. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from deployments.first_run.order import RULE_OF, RunStage
from deployments.first_run.results import RunVerdict, StageResult

_SEND_BACK = "Send back first-run.tar.gz. It has everything on this page, and of each stage:"
_HTML = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>First run: {{ word }}</title><style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; margin: .3rem 0 1.2rem }
td, th { border-bottom: 1px solid #ddd; padding: .25rem .6rem; text-align: left;
  vertical-align: top; overflow-wrap: anywhere }
h2 { margin-bottom: 0; font-size: 1.05rem }
p { margin: .2rem 0 }
.passed, .yes { color: #17692b } .failed, .no { color: #a51d1d } .blocked { color: #8a5a00 }
.skipped { color: #666 }
</style></head><body>
<h1>First run: <span class="{{ word }}">{{ word }}</span></h1>
<p>{{ verdict.reason }}</p>
{% if faults %}<h2>Faults of the run itself</h2><ul>
{% for fault in faults %}<li>{{ fault }}</li>{% endfor %}</ul>{% endif %}
<table>{% for name, value in run.items() if value is not none %}
<tr><th>{{ name }}</th><td>{{ value if value is string else value | join(", ") if value is sequence
else value }}</td></tr>{% endfor %}</table>
{% for result in results %}
<h2>{{ result.stage }}: <span class="{{ result.outcome }}">{{ result.outcome }}</span>
({{ "%.1f" | format(result.wall_s) }} s)</h2>
<p>Expected: {{ expects[result.stage] }}.</p><p>{{ result.reason }}</p>
{% if result.measurements %}<table><tr><th>what</th><th>expected</th><th>measured</th><th></th></tr>
{% for each in result.measurements %}<tr><td>{{ each.what }}</td><td>{{ each.expected }}</td>
<td>{{ each.measured }}</td><td>{% if each.is_met is true %}<span class="yes">met</span>
{% elif each.is_met is false %}<span class="no">not met</span>{% endif %}</td></tr>{% endfor %}
</table>{% endif %}{% endfor %}
<h2>What to send back</h2><p>{{ send_back }}</p><ul>
{% for result in results %}<li>{{ result.stage }}: {{ sends[result.stage] }}</li>{% endfor %}</ul>
</body></html>
"""


def text_page(
    run: Mapping[str, Any],
    verdict: RunVerdict,
    results: Sequence[StageResult],
    faults: Sequence[str],
) -> str:
    """Returns the page as text."""
    lines = [f"First run of {run['file']}: {_word(verdict)}", verdict.reason, ""]
    lines += [f"fault of the run itself: {fault}" for fault in faults]
    for result in results:
        rule = RULE_OF[RunStage(result.stage)]
        lines.append(f"{result.stage}: {result.outcome} ({result.wall_s:.1f} s)")
        lines.append(f"  expected: {rule.expects}")
        lines.append(f"  {result.reason}")
        for each in result.measurements:
            word = {True: "met", False: "NOT MET", None: "recorded"}[each.is_met]
            expected = f" (expected: {each.expected})" if each.expected else ""
            lines.append(f"  {word:<8} {each.what}: {each.measured}{expected}")
    lines += ["", _SEND_BACK]
    lines += [
        f"  {result.stage}: {RULE_OF[RunStage(result.stage)].sends_back}" for result in results
    ]
    return "\n".join(lines) + "\n"


def html_page(
    run: Mapping[str, Any],
    verdict: RunVerdict,
    results: Sequence[StageResult],
    faults: Sequence[str],
) -> str:
    """Returns the page as one HTML file that loads nothing."""
    template = jinja2.Environment(autoescape=True).from_string(_HTML)
    return template.render(
        run=run,
        verdict=verdict,
        word=_word(verdict),
        results=results,
        faults=faults,
        expects={rule.stage.value: rule.expects for rule in RULE_OF.values()},
        sends={rule.stage.value: rule.sends_back for rule in RULE_OF.values()},
        send_back=_SEND_BACK,
    )


def _word(verdict: RunVerdict) -> str:
    return "passed" if verdict.has_passed else "failed"
