//! What requests to a server need to know, found by asking it.

use super::limits::Limits;
use super::load::Load;
use super::pictures::{ImageLimits, MOST_PIXELS, Pictures, RATIOS, extreme, message};
use super::server::Server;
use crate::picture::{Format, Picture, Size};

/// A chat that tells how many tokens the template adds.
const SHORT_CHAT: &str = "Say 100";
/// Tokens that a request with pictures generates, at most.
const ROOM: usize = 8;

/// What the server proved, and what requests need to know.
pub(super) async fn learn(server: &Server, seed: u64) -> Result<Load, String> {
    let (limits, images) = server.proved().await?;
    let chat = server.chat_tokens(&SHORT_CHAT.into()).await?;
    let pictures = match (images, chat) {
        (Some(images), Some(chat)) => pictures(server, &limits, images, chat).await?,
        _ => None,
    };
    Ok(Load {
        model: server.model().await?,
        vocab_size: server.vocab_size().await?,
        chat: chat.is_some_and(|tokens| 2 * tokens <= limits.longest()),
        pictures,
        limits,
        seed,
    })
}

/// The pictures that requests may have, if one of them fits beside a chat of `chat` tokens.
async fn pictures(
    server: &Server,
    limits: &Limits,
    images: ImageLimits,
    chat: usize,
) -> Result<Option<Pictures>, String> {
    let (mut largest, room) = (images.largest, limits.longest().saturating_sub(ROOM));
    // Contexts may be shorter than the largest picture.
    let tokens = loop {
        let tokens = match largest.area() > MOST_PIXELS {
            true => None,
            false => tokens(server, largest).await?,
        };
        match tokens.filter(|&tokens| tokens <= room) {
            Some(tokens) => break tokens.saturating_sub(chat).max(1),
            None if largest.area() == 1 => return Ok(None),
            None => largest = smaller(largest),
        }
    };
    let mut ratio = 1;
    for candidate in RATIOS {
        let long = extreme(largest.area(), candidate);
        if tokens_of_both(server, long).await? {
            ratio = candidate;
            break;
        }
    }
    Ok(Some(Pictures {
        most: images
            .max_per_request
            .min(room.saturating_sub(chat) / tokens)
            .max(1),
        largest,
        tokens,
        text: chat,
        ratio,
    }))
}

/// Half the pixels.
fn smaller(Size { width, height }: Size) -> Size {
    let side = |side: usize| (side * 7 / 10).max(1);
    Size {
        width: side(width),
        height: side(height),
    }
}

async fn tokens_of_both(server: &Server, size: Size) -> Result<bool, String> {
    Ok(tokens(server, size).await?.is_some() && tokens(server, size.turned()).await?.is_some())
}

/// Tokens of the chat with a picture of this size, if the server takes it.
async fn tokens(server: &Server, size: Size) -> Result<Option<usize>, String> {
    let picture = Picture {
        size,
        seed: 0,
        format: Format::Png,
        grain: size.width.max(size.height),
    };
    server.chat_tokens(&message(&[picture], SHORT_CHAT)?).await
}
