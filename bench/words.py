"""Words that are one token each for a server's tokenizer, as its `/tokenize` says."""

import httpx

from deploy.target import NoRouter, refusal, why

LEAST = 40

_WORDS = """
about after again all also always and any are around ask back been before best better between
big book both bring but call came can car change children city close cold come could country day
did different does door down each early earth east end enough even every eyes face family far
father feel feet few find fire first five follow food for form found four from full game gave
get girl give good great green ground group grow had half hand hard has have head hear help her
here high him home horse hot house how idea into just keep kind know land large last late learn
leave left letter life light like line list little live long look made make man many may men
might mile money more most mother mountain move much music must name near need never new next
night north not now number off often old once one only open order other our out over own page
paper part people place plan plant play point read real red right river road room run said same
saw say school sea second see sentence set several she should show side sing small snow some
song soon sound south stand start state stay stop story street such sun sure table take talk
tell ten than that the their them then there these they thing think this those thought three
through time together too took top town tree turn two under until use very voice walk want war
warm was watch water way week well went were west what when where which while white who why wind
winter with without woman wood word work world would write year you
"""


class NotEnoughWords(Exception):
    """Of the list too few are one token; the text is for people."""


def one_token_words(http: httpx.Client, model: str) -> list[str]:
    """Raises NotEnoughWords, NoRouter."""
    found = [word for word in _WORDS.split() if _num_tokens(http, model, f" {word}") == 1]
    if len(found) < LEAST:
        raise NotEnoughWords(
            f"only {len(found)} words are one token of {model}: measure it by "
            "`python -m bench.serving --model-path FOLDER`, which reads the tokenizer"
        )
    return found


def _num_tokens(http: httpx.Client, model: str, text: str) -> int:
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    try:
        response = http.post("/tokenize", json=body)
        answer = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise NoRouter(why(http, error)) from error
    if response.is_error:
        raise NoRouter(refusal(answer) or f"/tokenize answers {response.status_code}")
    return int(answer["count"])
