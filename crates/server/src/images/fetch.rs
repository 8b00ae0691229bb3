//! Images of other servers, so that nobody can use this one to look into the network it stands in.
//!
//! A host must be allowed by name, and each address that its name has must be a public one; the connection is made to exactly
//! the addresses that were checked, so that a name cannot change in between. Every redirect is checked as the first address is.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use futures::StreamExt;
use reqwest::header::{ACCEPT, LOCATION};
use reqwest::redirect::Policy;
use reqwest::{Client, Response, Url};

/// Most redirects that are followed.
const MAX_REDIRECTS: usize = 5;

/// What may be fetched.
#[derive(Debug)]
pub(super) struct Fetch<'a> {
    /// Hosts, in lower case.
    pub(super) domains: &'a [String],
    /// Most bytes of a file.
    pub(super) max_bytes: usize,
    /// Most time for all of it, redirects included.
    pub(super) timeout: Duration,
    /// Whether connections to an address are allowed: [`is_public`].
    pub(super) may_reach: fn(IpAddr) -> bool,
}

impl Fetch<'_> {
    /// The file at `url`.
    pub(super) async fn get(&self, url: &str) -> Result<Vec<u8>, String> {
        let fetched = tokio::time::timeout(self.timeout, self.follow(url)).await;
        fetched.unwrap_or_else(|_| {
            let seconds = self.timeout.as_secs_f64();
            Err(format!("the image did not arrive within {seconds} s"))
        })
    }

    async fn follow(&self, url: &str) -> Result<Vec<u8>, String> {
        let mut url =
            Url::parse(url).map_err(|error| format!("the image's address is not valid: {error}"))?;
        for _ in 0..=MAX_REDIRECTS {
            let response = self.ask(&url).await?;
            if !response.status().is_redirection() {
                return self.body(response).await;
            }
            let next = response
                .headers()
                .get(LOCATION)
                .and_then(|next| next.to_str().ok());
            let next = next.and_then(|next| url.join(next).ok());
            url = next.ok_or("the image's server redirects to no valid address")?;
        }
        Err(format!(
            "the image's server redirects more than {MAX_REDIRECTS} times"
        ))
    }

    /// Checks the address and asks for what is there.
    async fn ask(&self, url: &Url) -> Result<Response, String> {
        if !matches!(url.scheme(), "http" | "https") {
            return Err(format!("`{}` is not supported; http and https are", url.scheme()));
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err("the image's address must have no user name and no password".to_owned());
        }
        let host = url
            .host_str()
            .unwrap_or_default()
            .trim_end_matches('.')
            .to_ascii_lowercase();
        if !self.domains.contains(&host) {
            return Err(format!(
                "images of `{host}` may not be fetched; --allowed-media-domains lists the hosts that may be"
            ));
        }
        let port = url.port_or_known_default().unwrap_or(443);
        let name = host.trim_start_matches('[').trim_end_matches(']');
        let found = tokio::net::lookup_host((name, port)).await;
        // Why a name has no address says something about the network of this server.
        let addresses: Vec<SocketAddr> = found.map(Iterator::collect).unwrap_or_default();
        if addresses.is_empty() {
            return Err(format!("`{host}` has no address"));
        }
        if !addresses.iter().all(|address| (self.may_reach)(address.ip())) {
            return Err(format!("`{host}` is not on the public internet"));
        }
        let client = Client::builder()
            .redirect(Policy::none())
            .no_proxy()
            .resolve_to_addrs(name, &addresses)
            .connect_timeout(self.timeout)
            .build()
            .map_err(|error| format!("the image cannot be fetched: {error}"))?;
        let response = client.get(url.clone()).header(ACCEPT, "image/*").send().await;
        let response = response.map_err(|_| format!("`{host}` does not answer"))?;
        let status = response.status();
        match status.is_success() || status.is_redirection() {
            true => Ok(response),
            false => Err(format!(
                "the image's server answers with status {}",
                status.as_u16()
            )),
        }
    }

    async fn body(&self, response: Response) -> Result<Vec<u8>, String> {
        let too_large = || format!("the image is larger than {} bytes", self.max_bytes);
        if response
            .content_length()
            .is_some_and(|length| length > self.max_bytes as u64)
        {
            return Err(too_large());
        }
        let mut bytes = Vec::new();
        let mut pieces = response.bytes_stream();
        while let Some(piece) = pieces.next().await {
            let piece = piece.map_err(|_| "the image's server ended before the image".to_owned())?;
            if bytes.len() + piece.len() > self.max_bytes {
                return Err(too_large());
            }
            bytes.extend_from_slice(&piece);
        }
        Ok(bytes)
    }
}

/// Whether an address is one of the public internet: neither of this machine, nor of a private network, nor special.
pub(super) fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => match embedded(address) {
            Some(inner) => is_public_v4(inner),
            // Only 2000::/3 is given out; of that, not the part for documentation and for tunnels (2001::/23).
            None => {
                let [first, second, ..] = address.segments();
                first & 0xe000 == 0x2000
                    && !(first == 0x2001 && (second < 0x200 || second == 0xdb8))
                    && !(first == 0x3fff && second < 0x1000)
            }
        },
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let special = address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_documentation()
        || a == 0
        // Shared by customers of a provider, benchmarks, protocol assignments, relays.
        || (a == 100 && b & 0xc0 == 64)
        || (a == 198 && b & 0xfe == 18)
        || (a == 192 && b == 0 && c == 0)
        || (a == 192 && b == 88 && c == 99)
        // Multicast, reserved, broadcast.
        || a >= 224;
    !special
}

/// The IPv4 address to which an IPv6 address leads: mapped, translated (NAT64), or 6to4.
fn embedded(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let [a, b, c, d, e, f, g, h] = address.segments();
    let joined = |high: u16, low: u16| Ipv4Addr::from(u32::from(high) << 16 | u32::from(low));
    match (a, b, c, d, e, f) {
        (0, 0, 0, 0, 0, 0xffff) | (0x64, 0xff9b, 0, 0, 0, 0) => Some(joined(g, h)),
        (0x2002, ..) => Some(joined(b, c)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    #[test]
    fn only_addresses_of_the_public_internet_are_reached() {
        let public = |text: &str| is_public(text.parse().unwrap());
        for address in [
            "1.1.1.1",
            "93.184.216.34",
            "2606:4700::1111",
            "64:ff9b::101:101",
            "2002:101:101::",
        ] {
            assert!(public(address), "{address}");
        }
        for address in [
            "0.0.0.0",
            "10.1.2.3",
            "100.64.0.1",
            "127.0.0.1",
            "169.254.169.254",
            "172.16.0.1",
            "192.168.1.1",
            "192.0.0.8",
            "192.0.2.1",
            "198.18.0.1",
            "198.51.100.7",
            "203.0.113.9",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "64:ff9b::7f00:1",
            "2002:7f00:1::",
            "fc00::1",
            "fd12::1",
            "fe80::1",
            "ff02::1",
            "2001:db8::1",
            "2001::1",
            "fec0::1",
            "::127.0.0.1",
        ] {
            assert!(!public(address), "{address}");
        }
    }

    /// A server that gives each connection the next response.
    async fn serve(responses: Vec<String>) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            for response in responses {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = [0; 2048];
                let _ = stream.read(&mut request).await;
                let _ = stream.write_all(response.as_bytes()).await;
            }
            // A connection that is never answered.
            let _open = listener.accept().await;
            std::future::pending::<()>().await;
        });
        port
    }

    fn ok(body: &str) -> String {
        format!(
            "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
            body.len()
        )
    }

    fn redirect(to: &str) -> String {
        format!("HTTP/1.1 302 Found\r\nlocation: {to}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    }

    async fn get(responses: Vec<String>, may_reach: fn(IpAddr) -> bool) -> Result<Vec<u8>, String> {
        let port = serve(responses).await;
        let domains = ["127.0.0.1".to_owned(), "localhost".to_owned()];
        let fetch = Fetch {
            domains: &domains,
            max_bytes: 10,
            timeout: Duration::from_secs(2),
            may_reach,
        };
        fetch.get(&format!("http://127.0.0.1:{port}/a.png")).await
    }

    #[tokio::test]
    async fn a_file_is_fetched_within_its_bounds() {
        let any: fn(IpAddr) -> bool = |_| true;
        assert_eq!(
            get(vec![ok("picture")], any).await.as_deref(),
            Ok(&b"picture"[..])
        );
        let relative = vec![redirect("/b.png"), ok("other")];
        assert_eq!(get(relative, any).await.as_deref(), Ok(&b"other"[..]));
        let chunked =
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n6\r\n123456\r\n6\r\n123456\r\n0\r\n\r\n";
        for (responses, why) in [
            (vec![ok("01234567890")], "larger than 10 bytes"),
            (vec![chunked.to_owned()], "larger than 10 bytes"),
            (
                vec!["HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n".to_owned()],
                "status 404",
            ),
            (vec![redirect("file:///etc/passwd")], "`file` is not supported"),
            (
                vec![redirect("http://example.com/")],
                "images of `example.com` may not be fetched",
            ),
            (vec![redirect("http://user@localhost/")], "no user name"),
            (vec![redirect("/again"); 7], "more than 5 times"),
            (vec![], "within 2 s"),
        ] {
            let error = get(responses, any).await.unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    #[tokio::test]
    async fn addresses_of_private_networks_are_refused() {
        let error = get(vec![ok("picture")], is_public).await.unwrap_err();
        assert!(error.contains("not on the public internet"), "{error}");
        // The first address may be reached, that of the redirect not.
        let port = serve(vec![ok("secret")]).await;
        let not_six: fn(IpAddr) -> bool =
            |address| address.is_ipv6() || address == IpAddr::from([127, 0, 0, 1]);
        let to = format!("http://127.0.0.2:{port}/");
        let error = get(vec![redirect(&to)], not_six).await.unwrap_err();
        assert!(error.contains("`127.0.0.2` may not be fetched"), "{error}");
    }
}
