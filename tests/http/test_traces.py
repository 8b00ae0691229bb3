"""OpenTelemetry traces, as a stand-in collector sees them."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from test_sim import CHAT, HELLO, error

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"


class Collector(HTTPServer):
    """Keeps the spans it is sent."""

    def __init__(self):
        self.spans = []
        self.services = set()
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        assert (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
        sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        for resource in sent.resource_spans:
            self.server.services |= {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
            for scope in resource.scope_spans:
                self.server.spans.extend(scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def value(any_value):
    kind = any_value.WhichOneof("value")
    inner = getattr(any_value, kind)
    return [value(item) for item in inner.values] if kind == "array_value" else inner


@pytest.fixture(scope="module")
def collected(start):
    """The collector, after a server with two requests has ended: what is left is sent at the end."""
    with Collector() as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        with start("sim", "--served-model-name", "sim", "--otlp-traces-endpoint", endpoint) as server:
            body = {"messages": HELLO, "max_tokens": 5, "ignore_eos": True, "temperature": 0.5, "top_p": 0.9}
            headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "x-request-id": "traced"}
            server.http.post(CHAT, json=body, headers=headers).raise_for_status()
            late = {**body, "max_tokens": 2000, "n": 50, "timeout": 0.3}
            assert error(server.http.post(CHAT, json=late), 504)
        yield collector
        collector.shutdown()


def test_a_span_has_the_attributes_of_the_conventions(collected):
    assert collected.services == {"plimsoll"}
    [span] = [span for span in collected.spans if span.trace_id.hex() == TRACE]
    assert span.parent_span_id.hex() == CALLER and span.name == "chat sim"
    assert span.kind == 2, "a server's span"
    attributes = {attribute.key: value(attribute.value) for attribute in span.attributes}
    assert attributes.items() >= {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "sim",
        "gen_ai.response.model": "sim",
        "gen_ai.request.id": "traced",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ["length"],
        "http.response.status_code": 200,
    }.items()
    assert attributes["gen_ai.usage.input_tokens"] > 5
    queue, first = attributes["gen_ai.latency.time_in_queue"], attributes["gen_ai.latency.time_to_first_token"]
    assert 0 <= queue <= first <= attributes["gen_ai.latency.e2e"]
    seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert seconds == pytest.approx(attributes["gen_ai.latency.e2e"], abs=1e-3)


def test_a_request_that_failed_says_why(collected):
    [span] = [span for span in collected.spans if span.trace_id.hex() != TRACE]
    attributes = {attribute.key: value(attribute.value) for attribute in span.attributes}
    assert attributes["error.type"] == "deadline_exceeded" and span.status.code == 2
