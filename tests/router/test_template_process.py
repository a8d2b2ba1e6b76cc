"""Chat templates run apart: what one takes is bounded, and it ends nobody else's request."""

import gc
import resource
import time

import pytest

from router import template_process
from router.chat_template import ChatTemplate
from router.errors import BadRequest, TemplateOccupied
from router.template_process import TemplateProcess, TemplateRefused

LOOPS = "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}"
BOMBS = {
    "loops in loops": "{% set n = 99999 %}" + LOOPS,
    "a power": "{{ n ** (n ** n) }}",
    "a power that is constant": "{{ 9 ** (9 ** 9) }}",
    "a long text": "{{ 'x' * n * 10 ** 9 }}",
    "a wide filter": "{{ 'x' | center(n * 10 ** 9) }}",
    "a wide format": "{{ '%99999999999d' % n }}",
    "doubling": "{% set t = namespace(x='x') %}{% for i in range(99) %}{% set t.x = t.x ~ t.x %}"
    "{% endfor %}{{ t.x }}",
    "a macro without end": "{% macro m(a) %}{{ m(a) }}{% endmacro %}{{ m(1) }}",
    "many loops": "{% for a in range(99999) %}{% for b in range(999) %}xxxxxxxxx{% endfor %}"
    "{% endfor %}",
}


def of_children_s() -> float:
    """Processor time of those that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_cut_off(name: str) -> None:
    """After half a second of a process of its own, however long that takes on a busy machine."""
    process = TemplateProcess(BOMBS[name])
    ours, theirs = time.process_time(), of_children_s()
    with pytest.raises(TemplateRefused):
        process.render({"n": 9})
    process.close()
    assert of_children_s() - theirs < 1.0
    assert time.process_time() - ours < 0.5


def test_after_a_bomb_the_next_one_is_rendered() -> None:
    template = ChatTemplate(
        "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}ok", {}
    )
    assert template.render([], variables={"n": 3}) == "ok"
    with pytest.raises(BadRequest, match="too much time"):
        template.render([], variables={"n": 99_999})
    assert template.render([], variables={"n": 3}) == "ok"


def test_who_waits_too_long_for_others_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "_PATIENCE_S", 0.05)
    template = ChatTemplate("ok", {})
    with template._process._lock, pytest.raises(TemplateOccupied) as refusal:
        template.render([])
    assert refusal.value.status == 503
    assert template.render([]) == "ok"


def test_what_a_template_may_not_reach() -> None:
    process = TemplateProcess("a{{ ''.__class__.__mro__ }}")
    with pytest.raises(TemplateRefused, match="unsafe"):
        process.render({})
    process.close()
    process = TemplateProcess("{{ cycler.__init__.__globals__.os.environ }}")
    with pytest.raises(TemplateRefused, match=r"unsafe|undefined"):
        process.render({})
    process.close()


def test_errors_are_the_templates_own_words() -> None:
    process = TemplateProcess("{{ raise_exception('no such role') if bad else 'fine 🌍\\ud800' }}")
    with pytest.raises(TemplateRefused, match="no such role"):
        process.render({"bad": True})
    assert process.render({"bad": False}).startswith("fine 🌍")
    process.close()
    with pytest.raises(TemplateRefused, match="unexpected"):
        TemplateProcess("{{ ").render({})


def test_it_ends_with_its_owner() -> None:
    process = TemplateProcess("x")
    assert process.render({}) == "x"
    child = process._process
    assert child is not None
    del process
    gc.collect()
    assert child.returncode is not None
