"""What a GPU did while something was measured on it: clocks, power, why it was slowed down, and the rates it can sustain."""

import contextlib
import json
import subprocess
import threading
import time

# Reasons for a lower clock, by nvidia-smi's names.
REASONS = ["sw_power_cap", "hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown"]
QUERY = ["timestamp", "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu",
         *(f"clocks_event_reasons.{reason}" for reason in REASONS)]
INTERVAL_MS = 100
# The GPU counts as loaded above this many watts: an idle H200 draws some 80.
LOADED_WATTS = 200


class Watch:
    """Samples the first GPU by nvidia-smi ten times a second; without a GPU it records nothing."""

    def __init__(self):
        self.samples = []
        self.process = None

    def __enter__(self):
        command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits",
                   f"--loop-ms={INTERVAL_MS}"]
        with contextlib.suppress(OSError):
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            threading.Thread(target=self.read, daemon=True).start()
        return self

    def __exit__(self, *_):
        if self.process:
            self.process.kill()
            self.process.wait()

    def read(self):
        for line in self.process.stdout:
            values = [value.strip() for value in line.split(",")]
            if len(values) == len(QUERY):
                self.samples.append((time.monotonic(), values[1:]))

    def between(self, end, seconds):
        """Clocks, power and reasons in the `seconds` before `end` (by time.monotonic); None without samples under load."""
        rows = [dict(zip(QUERY[1:], values)) for at, values in list(self.samples) if end - seconds <= at <= end]
        rows = [row for row in rows if number(row["power.draw"]) > LOADED_WATTS]
        if not rows:
            return None

        def mean(name):
            return sum(number(row[name]) for row in rows) / len(rows)

        slowed = {reason: sum(row[f"clocks_event_reasons.{reason}"] == "Active" for row in rows) / len(rows) for reason in REASONS}
        return {"samples": len(rows), "sm_mhz": mean("clocks.sm"), "sm_mhz_least": min(number(row["clocks.sm"]) for row in rows),
                "memory_mhz": mean("clocks.mem"), "watts": mean("power.draw"), "celsius": mean("temperature.gpu"),
                "slowed_part": {reason: part for reason, part in slowed.items() if part}}


def number(text):
    try:
        return float(text)
    except ValueError:
        return 0.0


@contextlib.contextmanager
def neighbour(gib):
    """Another process that holds so many GiB of the last GPU; needs a python3 with torch."""
    hold = f"""
import sys, torch
last = torch.cuda.device_count() - 1
held = torch.empty({gib} << 30, dtype=torch.uint8, device=f"cuda:{{last}}")
print(last, flush=True)
sys.stdin.read()
"""
    if not gib:
        yield
        return
    with subprocess.Popen(["python3", "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        if not process.stdout.readline():
            raise OSError("the neighbour could not take its memory")
        # It ends when its input does.
        yield


# Run in a process of its own, by a Python with torch, so that it leaves nothing on the GPU. Random numbers: products of zeros
# draw less power and are faster.
MEASURE_RATES = """
import json, time, torch

def weights(outputs, inputs, copies):
    return [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]

def seconds(step, least):
    step(); torch.cuda.synchronize()
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < least:
        for _ in range(4):
            step()
        torch.cuda.synchronize()
        count += 4
    return (time.perf_counter() - begin) / count

# The products of one layer of Llama-3.1-8B for 8192 rows, each with weights that are not in the cache.
shapes = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
sets = [weights(outputs, inputs, 4) for outputs, inputs in shapes]
rows = {inputs: torch.randn(8192, inputs, device="cuda", dtype=torch.bfloat16) for inputs in (4096, 14336)}

def layers():
    for copy in range(4):
        for (outputs, inputs), matrices in zip(shapes, sets):
            torch.nn.functional.linear(rows[inputs], matrices[copy])

operations = 4 * sum(2 * 8192 * outputs * inputs for outputs, inputs in shapes)
seconds(layers, 3)
sustained = operations / seconds(layers, 5)
ended = time.monotonic()
torch.cuda.empty_cache()
heads = weights(128256, 4096, 6)
row = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)

def read():
    for head in heads:
        torch.nn.functional.linear(row, head)

graph = torch.cuda.CUDAGraph()
read(); torch.cuda.synchronize()
with torch.cuda.graph(graph):
    read()
reads = sum(head.numel() * 2 for head in heads) / seconds(graph.replay, 2)
print(json.dumps({"products_per_second": sustained, "bytes_per_second": reads, "torch": torch.__version__,
                  "ended": ended, "seconds": 5}))
"""


def measure_rates(timeout):
    """What the GPU sustains: operations of bf16 products and bytes read in a second, with clocks and power; None without torch."""
    try:
        if subprocess.run(["python3", "-c", "import torch; assert torch.cuda.is_available()"], capture_output=True).returncode:
            return None
    except OSError:
        return None
    with Watch() as watch:
        done = subprocess.run(["python3", "-c", MEASURE_RATES], check=True, capture_output=True, text=True, timeout=timeout)
        rates = json.loads(done.stdout)
        meanwhile = watch.between(rates.pop("ended"), rates.pop("seconds"))
        return {**rates, "gpu_meanwhile": meanwhile}
