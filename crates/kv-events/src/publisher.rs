use std::net::TcpListener;

use zeromq::{PubSocket, RouterSocket, Socket, SocketSend, ZmqError, ZmqMessage};

use crate::Settings;
use crate::address::Address;
use crate::queue::Queue;
use crate::replay::Replay;
use crate::wire::encode;

/// An address cannot be listened on.
#[derive(Debug, thiserror::Error)]
#[error(
    "KV events cannot be published on {endpoint}: {source}; choose another endpoint in --kv-events-config"
)]
pub struct BindError {
    /// As it was understood.
    pub endpoint: String,
    /// What the operating system said.
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
    /// Listens where `settings` say. Subscribers may connect from here on, and are served once it [runs](Self::run).
    ///
    /// # Errors
    /// [`BindError`].
    pub fn bind(settings: Settings) -> Result<Self, BindError> {
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

    /// What the engine fills.
    pub fn queue(&self) -> Queue {
        self.queue.clone()
    }

    /// Publishes until it is dropped. Returns where a socket does not work.
    ///
    /// # Errors
    /// What ZeroMQ said.
    pub async fn run(self) -> Result<(), ZmqError> {
        let Self {
            listener,
            replay,
            settings,
            queue,
        } = self;
        let mut socket = PubSocket::new();
        socket.bind_listener(listener).await?;
        tracing::info!(endpoint = %settings.endpoint, topic = settings.topic, "KV events are published");
        let kept = match replay {
            None => None,
            Some(listener) => {
                let mut router = RouterSocket::new();
                router.bind_listener(listener).await?;
                Some((Replay::new(settings.buffer_steps), router))
            }
        };
        let Some((kept, router)) = kept else {
            return publish(&queue, &settings.topic, &mut socket, None).await;
        };
        tokio::select! {
            published = publish(&queue, &settings.topic, &mut socket, Some(&kept)) => published,
            () = kept.clone().serve(router) => Ok(()),
        }
    }
}

async fn publish(
    queue: &Queue,
    topic: &str,
    socket: &mut PubSocket,
    kept: Option<&Replay>,
) -> Result<(), ZmqError> {
    loop {
        let batch = queue.next().await;
        let mut message = ZmqMessage::from(topic);
        message.push_back(batch.sequence.to_be_bytes().to_vec().into());
        message.push_back(encode(batch.time, &batch.events).into());
        if let Some(kept) = kept {
            kept.keep(batch.sequence, message.clone());
        }
        socket.send(message).await?;
        queue.count_published();
    }
}
