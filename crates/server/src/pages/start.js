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

// Shows the progress in `#starting` until the server is ready; calls `waits` if it is not yet.
export async function started(waits = () => {}) {
  for (;;) {
    const report = await fetch("health").then((response) => response.json(), () => null);
    // A server that fails answers requests, with errors that say why.
    if (report && report.status !== "starting") break;
    waits();
    show(report);
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
  $("starting").hidden = true;
}

function show(report) {
  $("starting").hidden = false;
  const phase = report ? (PHASES[report.phase] ?? report.phase) : "The server cannot be reached. Trying again…";
  // Only what changed is read out.
  if ($("phase").textContent !== phase) $("phase").textContent = phase;
  if (!report) {
    $("progress").removeAttribute("value");
    $("progress-note").textContent = "";
    return;
  }
  $("progress").value = report.percent;
  const remaining = report.estimated_seconds === null ? [] : [`about ${Math.ceil(report.estimated_seconds)} s left`];
  $("progress-note").textContent = [`${Math.floor(report.percent)} %`, report.detail, ...remaining].filter(Boolean).join(" · ");
}
