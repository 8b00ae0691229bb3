use std::io::Result;
use std::net::TcpListener;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use socket2::{SockRef, TcpKeepalive};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedWriteHalf;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::Settings;
use crate::address::Address;
use crate::log::Log;
use crate::queue::Queue;
use crate::wire::encode;
use crate::zmtp::{self, Incoming, Kind, Reader};

/// Timeout of the handshake.
const PATIENCE: Duration = Duration::from_secs(5);
/// A subscriber that does not read pending data for this long is disconnected.
const SILENCE: Duration = Duration::from_secs(60);
/// TCP keepalive of idle subscribers: idle time, interval, number of probes.
const PROBE_AFTER: Duration = Duration::from_secs(30);
const PROBE_EVERY: Duration = Duration::from_secs(10);
const PROBES: u32 = 3;
/// Maximum number of peers of each socket. Both together stay below the default limit of 1024 open files.
const MAX_PEERS: usize = 256;
/// Least time between two log lines about refused peers.
const QUIET: Duration = Duration::from_secs(10);
/// Topics that a subscriber may name.
const MAX_SUBSCRIPTIONS: usize = 256;
/// The sequence number that ends a replay: -1.
const END: [u8; 8] = u64::MAX.to_be_bytes();

/// An address cannot be listened on.
#[derive(Debug, thiserror::Error)]
#[error(
    "KV events cannot be published on {endpoint}: {source}; choose another endpoint in --kv-events-config"
)]
pub struct BindError {
    /// The address, as parsed.
    pub endpoint: String,
    /// Error of the operating system.
    pub source: std::io::Error,
}

/// Sockets that listen.
#[derive(Debug)]
pub struct Publisher {
    listener: TcpListener,
    replay: Option<TcpListener>,
    settings: Settings,
    queue: Queue,
}

impl Publisher {
    /// Listens on the addresses of `settings`. Subscribers may connect from now on, and are served once it [runs](Self::run).
    ///
    /// # Errors
    /// [`BindError`].
    pub fn bind(settings: Settings) -> std::result::Result<Self, BindError> {
        let listen = |address: &Address| {
            address.listen().map_err(|source| BindError {
                endpoint: address.to_string(),
                source,
            })
        };
        Ok(Self {
            listener: listen(&settings.endpoint)?,
            replay: settings.replay_endpoint.as_ref().map(listen).transpose()?,
            queue: Queue::new(settings.max_queue_size),
            settings,
        })
    }

    /// The queue that the engine fills.
    pub fn queue(&self) -> Queue {
        self.queue.clone()
    }

    /// Publishes until it is dropped or a socket fails.
    ///
    /// # Errors
    /// Error of the operating system.
    pub async fn run(self) -> Result<()> {
        let Self {
            listener,
            replay,
            settings,
            queue,
        } = self;
        let Settings {
            endpoint,
            topic,
            hwm,
            buffer_steps,
            ..
        } = settings;
        tracing::info!(%endpoint, topic, "publishing KV events");
        let log = Arc::new(Log::new(buffer_steps.max(hwm)));
        let subscribers = {
            let (log, topic) = (Arc::clone(&log), topic.clone());
            let serve = move |stream| subscriber(stream, Arc::clone(&log), topic.clone(), hwm);
            accept(listener, serve)
        };
        let replays = {
            let log = Arc::clone(&log);
            async move {
                match replay {
                    Some(listener) => {
                        let serve = move |stream| replayed(stream, Arc::clone(&log), buffer_steps);
                        accept(listener, serve).await
                    }
                    None => std::future::pending().await,
                }
            }
        };
        tokio::select! {
            failed = subscribers => failed,
            failed = replays => failed,
            () = publish(&queue, &log, &topic) => Ok(()),
        }
    }
}

/// Moves batches from the queue to the log, for ever.
async fn publish(queue: &Queue, log: &Log, topic: &str) {
    loop {
        let batch = queue.next().await;
        let payload = encode(batch.time, &batch.events);
        let frames: [&[u8]; 3] = [topic.as_bytes(), &batch.sequence.to_be_bytes(), &payload];
        log.push(batch.sequence, zmtp::message(&frames));
        queue.count_published();
    }
}

/// Accepts connections, and serves each in its own task, which ends with this one.
async fn accept<F>(listener: TcpListener, serve: impl Fn(TcpStream) -> F) -> Result<()>
where
    F: Future<Output = Result<()>> + Send + 'static,
{
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let mut peers = JoinSet::new();
    let mut warned: Option<Instant> = None;
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) if peers.len() < MAX_PEERS => {
                    if let Err(error) = prepare(&stream, SILENCE) {
                        tracing::debug!(%error, "a subscriber disconnected");
                        continue;
                    }
                    let served = serve(stream);
                    peers.spawn(async move {
                        if let Err(error) = served.await {
                            tracing::debug!(%error, "a subscriber disconnected");
                        }
                    });
                }
                Ok((_, address)) => {
                    // Refused peers reconnect again and again.
                    if warned.is_none_or(|warned| warned.elapsed() > QUIET) {
                        warned = Some(Instant::now());
                        tracing::warn!(%address, "too many subscribers to KV events: refused one");
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a subscriber to KV events");
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            },
            Some(_) = peers.join_next() => {}
        }
    }
}

/// Enables TCP keepalive, to detect peers that vanished.
fn prepare(stream: &TcpStream, silence: Duration) -> Result<()> {
    let socket = SockRef::from(stream);
    let probes = TcpKeepalive::new()
        .with_time(PROBE_AFTER)
        .with_interval(PROBE_EVERY)
        .with_retries(PROBES);
    socket.set_tcp_keepalive(&probes)?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(silence))?;
    Ok(())
}

/// Topics of a subscriber.
#[derive(Debug, Default)]
struct Subscriptions(Mutex<Vec<Vec<u8>>>);

impl Subscriptions {
    /// Handles a subscription; an error if there are too many.
    fn change(&self, subscribes: bool, topic: &[u8]) -> Result<()> {
        let mut topics = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !subscribes {
            if let Some(at) = topics.iter().position(|one| one == topic) {
                topics.swap_remove(at);
            }
        } else if topics.len() < MAX_SUBSCRIPTIONS {
            topics.push(topic.to_vec());
        } else {
            return Err(std::io::Error::other("too many subscriptions"));
        }
        Ok(())
    }

    fn want(&self, topic: &str) -> bool {
        let topics = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        topics.iter().any(|one| topic.as_bytes().starts_with(one))
    }
}

/// Serves a subscriber from now on.
async fn subscriber(stream: TcpStream, log: Arc<Log>, topic: String, hwm: usize) -> Result<()> {
    let (reader, writer) = tokio::time::timeout(PATIENCE, zmtp::greet(stream, Kind::Pub)).await??;
    let subscriptions = Subscriptions::default();
    let (pong, pongs) = mpsc::channel::<Vec<u8>>(1);
    let wanted = || subscriptions.want(&topic);
    tokio::select! {
        sent = send(writer, &log, hwm, wanted, pongs) => sent,
        heard = listen(reader, &subscriptions, pong) => heard,
    }
}

/// Sends published batches of the subscribed topics. A subscriber more than `hwm` batches behind misses the oldest.
async fn send(
    mut writer: OwnedWriteHalf,
    log: &Log,
    hwm: usize,
    wanted: impl Fn() -> bool,
    mut pongs: mpsc::Receiver<Vec<u8>>,
) -> Result<()> {
    let mut end = log.end();
    let mut next: u64 = *end.borrow_and_update();
    loop {
        while let Some(batch) = log.next(next, hwm) {
            next = batch.sequence + 1;
            if wanted() {
                writer.write_all(&batch.message).await?;
            }
        }
        tokio::select! {
            changed = end.changed() => changed.map_err(std::io::Error::other)?,
            Some(pong) = pongs.recv() => writer.write_all(&pong).await?,
        }
    }
}

/// Reads subscriptions, as messages (ZMTP 3.0) or commands (3.1), and heartbeats.
async fn listen(
    mut reader: Reader,
    subscriptions: &Subscriptions,
    pong: mpsc::Sender<Vec<u8>>,
) -> Result<()> {
    loop {
        match reader.next().await? {
            Incoming::Message(frames) => match frames[0].split_first() {
                Some((1, topic)) => subscriptions.change(true, topic)?,
                Some((0, topic)) => subscriptions.change(false, topic)?,
                _ => {}
            },
            Incoming::Command(name, rest) => match (name.as_slice(), rest.as_slice()) {
                (b"SUBSCRIBE", topic) => subscriptions.change(true, topic)?,
                (b"CANCEL", topic) => subscriptions.change(false, topic)?,
                // The first two bytes are a timeout.
                (b"PING", [_, _, context @ ..]) => {
                    // One pending answer is enough.
                    let _ = pong.try_send(zmtp::command(b"PONG", context));
                }
                _ => {}
            },
        }
    }
}

/// Answers replay requests.
async fn replayed(stream: TcpStream, log: Arc<Log>, most: usize) -> Result<()> {
    let (mut reader, mut writer) =
        tokio::time::timeout(PATIENCE, zmtp::greet(stream, Kind::Router)).await??;
    loop {
        let frames = match reader.next().await? {
            Incoming::Message(frames) => frames,
            Incoming::Command(name, rest) => {
                if let (b"PING", [_, _, context @ ..]) = (name.as_slice(), rest.as_slice()) {
                    writer.write_all(&zmtp::command(b"PONG", context)).await?;
                }
                continue;
            }
        };
        let [empty, start] = &frames[..] else {
            tracing::debug!(frames = frames.len(), "a replay request must have two frames");
            continue;
        };
        let (true, Ok(start)) = (empty.is_empty(), <[u8; 8]>::try_from(&start[..])) else {
            tracing::debug!("a replay request must be an empty frame and eight bytes");
            continue;
        };
        let mut next = u64::from_be_bytes(start);
        let end = *log.end().borrow();
        while let Some(batch) = log.next(next, most).filter(|batch| batch.sequence < end) {
            next = batch.sequence + 1;
            writer.write_all(&ENVELOPE).await?;
            writer.write_all(&batch.message).await?;
        }
        writer.write_all(&zmtp::message(&[b"", b"", &END, b""])).await?;
    }
}

/// An empty frame, and more.
const ENVELOPE: [u8; 2] = [1, 0];

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[tokio::test]
    async fn who_reads_nothing_is_given_up_and_who_reads_is_not() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let silence = Duration::from_secs(1);
        // Reads nothing, and stays connected.
        let idle = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut stream, _) = listener.accept().await.unwrap();
        prepare(&stream, silence).unwrap();
        let batch = vec![0; 1 << 20];
        let sent = async {
            loop {
                if let Err(error) = stream.write_all(&batch).await {
                    return error.kind();
                }
            }
        };
        let kind = tokio::time::timeout(Duration::from_secs(60), sent).await.unwrap();
        assert_eq!(kind, std::io::ErrorKind::TimedOut);
        drop(idle);
        // Has nothing to read for longer than that.
        let mut quiet = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut stream, _) = listener.accept().await.unwrap();
        prepare(&stream, silence).unwrap();
        tokio::time::sleep(3 * silence).await;
        stream.write_all(b"late").await.unwrap();
        let mut heard = [0; 4];
        tokio::io::AsyncReadExt::read_exact(&mut quiet, &mut heard)
            .await
            .unwrap();
        assert_eq!(&heard, b"late");
    }
}
