"""schemathesis over the server's own OpenAPI document: whatever the document allows is answered as the document says, and
whatever it forbids is refused."""

import conftest
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance, response_schema_conformance

# Of each operation and mode; the seed is fixed by `derandomize`.
EXAMPLES = 30
# What ends or pauses the server is no subject of random tests.
NOT_CALLED = {"/admin/drain", "/sleep", "/wake_up"}


@pytest.fixture(scope="module")
def server(start):
    with start("sim", "--max-model-len", "512", "--served-model-name", "sim", "--max-queue", "4096") as server:
        yield server


def problems(operation, mode: GenerationMode, url: str) -> list[str]:
    """What schemathesis has to say about answers to random requests."""

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=EXAMPLES, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))
    def check(case):
        # A schema cannot say everything: an empty prompt, or one that is too long, is refused all the same.
        response = case.call(base_url=url, timeout=conftest.PATIENCE)
        excluded = [positive_data_acceptance]
        if isinstance(case.body, dict) and None in case.body.values():
            # Null is as absent, also in a field that there is not.
            excluded.append(negative_data_rejection)
        if "text/event-stream" in response.headers.get("content-type", [""])[0]:
            # The document's schema is that of an event's data, which test_openapi.py checks.
            excluded.append(response_schema_conformance)
        case.validate_response(response, excluded_checks=excluded)

    try:
        check()
    except Unsatisfiable:
        # An operation without parameters cannot be called wrongly.
        return []
    except BaseExceptionGroup as group:
        return [f"{operation.label}: {error}" for error in group.exceptions]
    except AssertionError as error:
        return [f"{operation.label}: {error}"]
    return []


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_the_document_is_kept(server, mode):
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in document.get_all_operations()]
    called = [operation for operation in operations if operation.path not in NOT_CALLED]
    assert len(called) >= 10
    found = [problem for operation in called for problem in problems(operation, mode, server.url)]
    assert not found, "\n\n".join(found)
    server.wait_until_empty()
    assert "panic" not in server.log.read_text(errors="replace")
