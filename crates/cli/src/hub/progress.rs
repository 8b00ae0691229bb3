//! Progress of one download from the Hub: a bar, and the start's.

use std::collections::HashMap;
use std::sync::Arc;

use hf_hub::progress::{DownloadEvent, Progress, ProgressEvent, ProgressHandler};
use indicatif::ProgressBar;
use parking_lot::Mutex;

use super::RemoteFile;
use crate::bytes::Bytes;
use crate::progress::bytes_bar;
use crate::start::StartProgress;
use crate::terminal;

/// Progress of one download from the Hub.
#[derive(Debug)]
pub(super) struct DownloadBar {
    bar: ProgressBar,
    files: usize,
    start: StartProgress,
}

impl DownloadBar {
    /// `missing`: the files to come with their sizes; with none of them, nothing is shown.
    pub(super) fn new(repo: &str, missing: &[RemoteFile], start: &StartProgress) -> Self {
        let total = missing.iter().map(|file| file.size).sum();
        let mut bar = ProgressBar::hidden();
        if !missing.is_empty() {
            start.downloads();
            tracing::info!("downloading {} files of {repo}, {}", missing.len(), Bytes(total));
            bar = bytes_bar("download", total);
        }
        Self {
            bar,
            files: missing.len(),
            start: start.clone(),
        }
    }

    pub(super) fn handler(&self) -> Progress {
        Arc::new(Handler {
            bar: self.bar.clone(),
            start: (self.files > 0).then(|| self.start.clone()),
            done: Mutex::default(),
        })
        .into()
    }

    pub(super) fn finish(&self, complete: bool) {
        self.bar.finish_and_clear();
        let (files, seconds) = (self.files, self.bar.elapsed().as_secs_f64());
        if files == 0 {
            return;
        }
        tracing::debug!(files, seconds, "download ended");
        if complete {
            let bytes = Bytes(self.bar.length().unwrap_or(0));
            terminal::phase(
                "download",
                format_args!("{files} files, {bytes} in {seconds:.1} s"),
            );
        }
    }
}

struct Handler {
    bar: ProgressBar,
    /// Unless there is nothing to download.
    start: Option<StartProgress>,
    /// Bytes by file; what xet transfers is known only in sum and stands under the empty name.
    done: Mutex<HashMap<String, u64>>,
}

impl ProgressHandler for Handler {
    fn on_progress(&self, event: &ProgressEvent) {
        let ProgressEvent::Download(event) = event else {
            return;
        };
        let mut done = self.done.lock();
        match event {
            DownloadEvent::Progress { files } => {
                for file in files {
                    done.insert(file.filename.clone(), file.bytes_completed);
                }
            }
            DownloadEvent::AggregateProgress { bytes_completed, .. } => {
                done.insert(String::new(), *bytes_completed);
            }
            DownloadEvent::Start { .. } | DownloadEvent::Complete => return,
        }
        let done = done.values().sum();
        self.bar.set_position(done);
        if let (Some(start), Some(total)) = (&self.start, self.bar.length()) {
            start.bytes(done, total);
        }
    }
}
