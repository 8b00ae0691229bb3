//! The server side of ZMTP 3 without security (ZeroMQ RFC 23 and 37), as far as subscriptions and replay need it. The `zeromq`
//! crate is not used: it allocates whatever length a peer announces for a frame, so that anybody who reaches the port could
//! crash the process.

use std::io::{Error, ErrorKind, Result};

use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

/// Largest frame that a peer may send: a topic or a number.
const MAX_FRAME: u64 = 4096;
/// Most frames of a message that a peer may send.
const MAX_FRAMES: usize = 8;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Type of a socket.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// Sends to all subscribers.
    Pub,
    /// Answers requests.
    Router,
}

impl Kind {
    fn name(self) -> &'static [u8] {
        match self {
            Self::Pub => b"PUB",
            Self::Router => b"ROUTER",
        }
    }

    fn talks_to(self, peer: &[u8]) -> bool {
        let peers: &[&[u8]] = match self {
            Self::Pub => &[b"SUB", b"XSUB"],
            Self::Router => &[b"REQ", b"DEALER", b"ROUTER"],
        };
        peers.contains(&peer)
    }
}

/// A message or command of a peer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Incoming {
    /// Frames.
    Message(Vec<Vec<u8>>),
    /// Protocol command: name and data.
    Command(Vec<u8>, Vec<u8>),
}

/// Reads what a peer sends.
#[derive(Debug)]
pub(crate) struct Reader(BufReader<OwnedReadHalf>);

/// Does the handshake with a peer that connected to a socket of `kind`.
pub(crate) async fn greet(stream: TcpStream, kind: Kind) -> Result<(Reader, OwnedWriteHalf)> {
    stream.set_nodelay(true)?;
    let (reader, mut writer) = stream.into_split();
    let mut reader = Reader(BufReader::new(reader));
    writer.write_all(&greeting()).await?;
    let mut theirs = [0; 64];
    reader.0.read_exact(&mut theirs).await?;
    if theirs[0] != 0xff || theirs[9] != 0x7f || theirs[10] < 3 || theirs[12..32] != mechanism() {
        return Err(malformed("no ZMTP 3 without security"));
    }
    let metadata: [&[u8]; 4] = [
        &[11],
        b"Socket-Type",
        &(kind.name().len() as u32).to_be_bytes(),
        kind.name(),
    ];
    writer.write_all(&command(b"READY", &metadata.concat())).await?;
    match reader.next().await? {
        Incoming::Command(name, metadata) if name == b"READY" => match socket_type(&metadata) {
            Some(peer) if kind.talks_to(peer) => Ok((reader, writer)),
            _ => Err(malformed("a socket that does not go with this one")),
        },
        _ => Err(malformed("no READY")),
    }
}

impl Reader {
    /// The next message or command.
    pub(crate) async fn next(&mut self) -> Result<Incoming> {
        let mut frames = Vec::new();
        while frames.len() < MAX_FRAMES {
            let flags = self.0.read_u8().await?;
            let length = match flags & LONG {
                0 => u64::from(self.0.read_u8().await?),
                _ => self.0.read_u64().await?,
            };
            if flags > MORE | LONG | COMMAND || length > MAX_FRAME {
                return Err(malformed("a frame that is too long, or none"));
            }
            let mut body = vec![0; length as usize];
            self.0.read_exact(&mut body).await?;
            if flags & COMMAND != 0 {
                let end = 1 + usize::from(
                    *body
                        .first()
                        .ok_or_else(|| malformed("a command without a name"))?,
                );
                let name = body.get(1..end).ok_or_else(|| malformed("half a name"))?;
                return Ok(Incoming::Command(name.to_vec(), body[end..].to_vec()));
            }
            frames.push(body);
            if flags & MORE == 0 {
                return Ok(Incoming::Message(frames));
            }
        }
        Err(malformed("a message of too many frames"))
    }
}

/// A whole message.
pub(crate) fn message(frames: &[&[u8]]) -> Vec<u8> {
    let mut message = Vec::new();
    for (index, frame) in frames.iter().enumerate() {
        let more = if index + 1 < frames.len() { MORE } else { 0 };
        append(&mut message, more, frame);
    }
    message
}

/// A whole command.
pub(crate) fn command(name: &[u8], rest: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    append(
        &mut frame,
        COMMAND,
        &[&[name.len() as u8][..], name, rest].concat(),
    );
    frame
}

fn append(to: &mut Vec<u8>, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(length) => to.extend([flags, length]),
        Err(_) => {
            to.push(flags | LONG);
            to.extend((body.len() as u64).to_be_bytes());
        }
    }
    to.extend_from_slice(body);
}

fn greeting() -> [u8; 64] {
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..32].copy_from_slice(&mechanism());
    greeting
}

fn mechanism() -> [u8; 20] {
    let mut mechanism = [0; 20];
    mechanism[..4].copy_from_slice(b"NULL");
    mechanism
}

/// The property of that name.
fn socket_type(mut metadata: &[u8]) -> Option<&[u8]> {
    loop {
        let (&length, rest) = metadata.split_first()?;
        let (name, rest) = rest.split_at_checked(usize::from(length))?;
        let (length, rest) = rest.split_first_chunk::<4>()?;
        let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*length) as usize)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return Some(value);
        }
        metadata = rest;
    }
}

fn malformed(what: &'static str) -> Error {
    Error::new(ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    /// What the listening side makes of a peer that sends `bytes` and no more.
    async fn shake(kind: Kind, bytes: Vec<u8>) -> Result<Incoming> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let mut peer = TcpStream::connect(listener.local_addr()?).await?;
        peer.write_all(&bytes).await?;
        peer.shutdown().await?;
        let (mut reader, _) = greet(listener.accept().await?.0, kind).await?;
        reader.next().await
    }

    fn hello(socket: &[u8]) -> Vec<u8> {
        let identity: [&[u8]; 5] = [&[8], b"Identity", &[0, 0, 0, 0], &[11], b"socket-type"];
        let identity = identity.concat();
        let metadata = [&identity[..], &(socket.len() as u32).to_be_bytes(), socket].concat();
        [&greeting()[..], &command(b"READY", &metadata)].concat()
    }

    #[tokio::test]
    async fn peers_that_go_together_talk() {
        let long = [7; 300];
        let frames: [&[u8]; 3] = [b"", b"topic", &long];
        let said = [hello(b"REQ"), message(&frames)].concat();
        let heard = shake(Kind::Router, said).await.unwrap();
        assert_eq!(heard, Incoming::Message(frames.map(<[u8]>::to_vec).to_vec()));
        let said = [hello(b"XSUB"), command(b"SUBSCRIBE", b"kv@")].concat();
        let heard = shake(Kind::Pub, said).await.unwrap();
        assert_eq!(heard, Incoming::Command(b"SUBSCRIBE".to_vec(), b"kv@".to_vec()));
    }

    #[tokio::test]
    async fn whatever_comes_is_an_error_at_worst() {
        let announce = |length: u64| [&[LONG][..], &length.to_be_bytes()].concat();
        let huge = [1 << 20, 1 << 40, u64::MAX].map(|length| [hello(b"SUB"), announce(length)].concat());
        let too_many = [hello(b"SUB"), [MORE, 0].repeat(100)].concat();
        let others = [
            b"GET / HTTP/1.1\r\n\r\n".repeat(8),
            hello(b"PUSH"),
            greeting().to_vec(),
            [&greeting()[..], &message(&[b"READY"])].concat(),
            [&greeting()[..], &[COMMAND, 0]].concat(),
            [&greeting()[..], &[COMMAND, 2, 9, b'R']].concat(),
            [&greeting()[..], &command(b"READY", &[11, b'S'])].concat(),
            [hello(b"SUB"), vec![0xff, 0]].concat(),
            too_many,
        ];
        for bytes in huge.into_iter().chain(others) {
            let answer = shake(Kind::Pub, bytes.clone()).await;
            assert!(answer.is_err(), "{bytes:?}: {answer:?}");
        }
    }
}
