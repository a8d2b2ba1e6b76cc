"""LangChain's own standard tests of chat models, against its OpenAI client on our endpoint.

Runs where the extra `clients` is installed. What asks for a model that looks at pictures or calls
tools by its own wit does not apply to fake workers.
"""

from typing import Any

import pytest

pytest.importorskip("langchain_openai", reason="needs the extra `clients` (langchain-openai)")
pytest.importorskip("langchain_tests", reason="needs the extra `clients` (langchain-tests)")

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI, OpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from tests.router.served_fakes import ANSWER

pytestmark = [
    pytest.mark.filterwarnings("default"),  # they are the libraries' own
    pytest.mark.asyncio(loop_scope="module"),  # its client keeps connections, and with them a loop
]


class TestLangChainChat(ChatModelIntegrationTests):
    url = ""

    @pytest.fixture(autouse=True)
    def _served(self, served_url: str) -> None:
        type(self).url = served_url

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "tiny",
            "base_url": f"{self.url}/v1",
            "api_key": "none",
            "max_retries": 0,
            "stream_usage": True,  # which it asks for by itself at OpenAI's own address alone
        }

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def returns_usage_metadata(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return False


def test_text_completions(served_url: str) -> None:
    llm = OpenAI(model="tiny", base_url=f"{served_url}/v1", api_key="none", max_retries=0)
    assert llm.invoke("Capital of France?") == ANSWER
    assert "".join(llm.stream("Capital of France?")) == ANSWER
    assert llm.batch(["a", "b"]) == [ANSWER] * 2
