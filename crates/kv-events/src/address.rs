use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener};

/// Address of a listening socket: `tcp://HOST:PORT`, with `*` for every IPv4 address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    host: String,
    port: u16,
}

impl Address {
    /// `None` if it cannot be parsed.
    pub(crate) fn parse(endpoint: &str) -> Option<Self> {
        let (host, port) = endpoint.strip_prefix("tcp://")?.rsplit_once(':')?;
        let host = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'))
            .unwrap_or(host);
        let host = match host {
            "" => return None,
            "*" => Ipv4Addr::UNSPECIFIED.to_string(),
            host => host.to_owned(),
        };
        Some(Self {
            host,
            port: port.parse().ok()?,
        })
    }

    /// True for every address of this machine.
    pub(crate) fn is_wildcard(&self) -> bool {
        [
            Ipv4Addr::UNSPECIFIED.to_string(),
            Ipv6Addr::UNSPECIFIED.to_string(),
        ]
        .contains(&self.host)
    }

    /// Listens there.
    pub(crate) fn listen(&self) -> std::io::Result<TcpListener> {
        TcpListener::bind((self.host.as_str(), self.port))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') {
            write!(f, "tcp://[{host}]:{port}")
        } else {
            write!(f, "tcp://{host}:{port}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        for (endpoint, shown, wildcard) in [
            ("tcp://*:5557", "tcp://0.0.0.0:5557", true),
            ("tcp://[::]:5557", "tcp://[::]:5557", true),
            ("tcp://:::5557", "tcp://[::]:5557", true),
            ("tcp://127.0.0.1:1", "tcp://127.0.0.1:1", false),
        ] {
            let address = Address::parse(endpoint).unwrap();
            assert_eq!(
                (address.to_string().as_str(), address.is_wildcard()),
                (shown, wildcard)
            );
        }
        for wrong in [
            "",
            "*:5557",
            "ipc:///tmp/x",
            "tcp://*",
            "tcp://*:",
            "tcp://:1",
            "tcp://*:65536",
        ] {
            assert_eq!(Address::parse(wrong), None, "{wrong}");
        }
    }
}
