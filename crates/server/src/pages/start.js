// The progress of the server's start.
import { $ } from "./dom.js";

const POLL_MS = 500;
const PHASES = {
  resolve: "Finding the model",
  download: "Downloading the model",
  device: "Opening the device",
  weights: "Loading the weights",
  probe: "Measuring the worst-case steps",
  rebuild: "Allocating the KV cache",
  capture: "Capturing CUDA graphs",
  validate: "Proving the size of the KV cache",
  engine: "Starting the engine",
};

// Shows the progress in `#starting` until the server is ready; calls `waits` if it is not yet. Throws once `signal` is aborted.
// Returns whether it had to wait.
export async function started(waits = () => {}, signal = null) {
  let waited = false;
  try {
    for (;;) {
      const report = await fetch("health", { signal }).then((response) => response.json()).catch(() => null);
      signal?.throwIfAborted();
      // A server that fails answers requests, with errors that say why.
      if (report && report.status !== "starting") return waited;
      waited = true;
      waits();
      show(report);
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  } finally {
    $("starting").hidden = true;
  }
}

function show(report) {
  if ($("starting").hidden) {
    $("starting").hidden = false;
    $("starting").scrollIntoView({ block: "nearest" });
  }
  const phase = report ? (PHASES[report.phase] ?? report.phase) : "The server cannot be reached. Trying again…";
  // Only what changed is read out.
  if ($("phase").textContent !== phase) $("phase").textContent = phase;
  if (!report) {
    $("progress").removeAttribute("value");
    $("progress-note").textContent = "";
    return;
  }
  $("progress").value = report.percent;
  const remaining = report.estimated_seconds === null ? [] : [`about\u00a0${Math.ceil(report.estimated_seconds)}\u00a0s\u00a0left`];
  $("progress-note").textContent = [`${Math.floor(report.percent)}\u00a0%`, report.detail, ...remaining].filter(Boolean).join(" · ");
}
