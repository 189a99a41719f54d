//! Which peers are proxies whose word is taken for where a request came from.

use std::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;

/// Proxies in front of the gateway. Nobody, by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustedProxies(Vec<IpNet>);

/// Networks of one entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrustedProxy(Vec<IpNet>);

/// Not a network.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a network; write an address such as 10.0.0.5, a network such as 10.0.0.0/8, loopback or private"
)]
pub struct InvalidNetwork(String);

impl TrustedProxies {
    /// Whether nobody is.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn contains(&self, peer: IpAddr) -> bool {
        self.0.iter().any(|network| network.contains(&peer))
    }
}

impl FromIterator<TrustedProxy> for TrustedProxies {
    fn from_iter<I: IntoIterator<Item = TrustedProxy>>(entries: I) -> Self {
        Self(entries.into_iter().flat_map(|entry| entry.0).collect())
    }
}

impl FromStr for TrustedProxy {
    type Err = InvalidNetwork;

    fn from_str(text: &str) -> Result<Self, InvalidNetwork> {
        let named: &[&str] = match text {
            "loopback" => &["127.0.0.0/8", "::1/128"],
            "private" => {
                &["127.0.0.0/8", "::1/128", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"]
            }
            other => &[other],
        };
        let read =
            |text: &&str| text.parse::<IpNet>().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from));
        let networks: Option<Vec<IpNet>> = named.iter().map(read).collect();
        networks.map(Self).ok_or_else(|| InvalidNetwork(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_are_read_and_hold_what_they_say() {
        let trusts = |entries: &[&str], peer: &str| {
            let proxies: TrustedProxies = entries.iter().map(|entry| entry.parse().unwrap()).collect();
            proxies.contains(peer.parse().unwrap())
        };
        assert!(trusts(&["10.0.0.0/8"], "10.9.8.7") && !trusts(&["10.0.0.0/8"], "11.0.0.1"));
        assert!(trusts(&["192.0.2.7"], "192.0.2.7") && !trusts(&["192.0.2.7"], "192.0.2.8"));
        assert!(trusts(&["loopback"], "127.0.0.1") && trusts(&["loopback"], "::1"));
        assert!(trusts(&["private"], "172.20.0.1") && !trusts(&["private"], "8.8.8.8"));
        assert!(trusts(&["2001:db8::/32", "10.0.0.1"], "2001:db8::7"));
        assert!(!trusts(&[], "127.0.0.1"));
        for wrong in ["", "10.0.0.0/33", "localhost", "10.0.0"] {
            assert_eq!(wrong.parse::<TrustedProxy>(), Err(InvalidNetwork(wrong.into())));
        }
    }
}
