//! Where requests come from and go to; browsers; the operator's own listener.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use onlyonce_gateway::{Admin, AdminToken, ClientTls, GatewayOptions, TrustedProxy, UpstreamUrl};
use onlyonce_http::Cors;

use crate::commands::secret::Unrepeated;
use crate::commands::tls::{self, doing, invalid, read};
use crate::failure::Failure;

#[derive(Debug, Args)]
pub(crate) struct NetworkArgs {
    /// Where to listen
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8080", value_parser = address)]
    pub(crate) listen: SocketAddr,
    /// The API behind: http://HOST:PORT, https:// with TLS, h2c:// for HTTP/2 with prior knowledge, h2:// for HTTP/2 in TLS
    #[arg(long, value_name = "URL", required_unless_present = "explain_route")]
    #[arg(value_parser = Unrepeated(str::parse::<UpstreamUrl>))]
    pub(crate) upstream: Option<UpstreamUrl>,
    /// A proxy in front, whose X-Forwarded-Proto, -Host and -For are kept: an address, a network such as 10.0.0.0/8,
    /// loopback or private; may be repeated. From anybody else -Proto and -Host are set anew; to -For the address of who
    /// connects is always added, and what is left of it is only what a client says
    #[arg(long, value_name = "NETWORK")]
    trust_proxy: Vec<TrustedProxy>,
    /// A file of certificate authorities (PEM) that the upstream's certificate must be from, instead of the system's
    #[arg(long, value_name = "FILE")]
    upstream_ca: Option<PathBuf>,
    /// A file with a certificate (PEM, with its chain) to show to the upstream
    #[arg(long, value_name = "FILE", requires = "upstream_key")]
    upstream_cert: Option<PathBuf>,
    /// The file with its private key (PEM)
    #[arg(long, value_name = "FILE", requires = "upstream_cert")]
    upstream_key: Option<PathBuf>,
    /// Send the upstream's own address as Host; by default the client's Host goes on
    #[arg(long)]
    rewrite_host: bool,
}

impl NetworkArgs {
    /// The options of a gateway with all other defaults.
    pub(crate) fn options(&self) -> Result<GatewayOptions, Failure> {
        let Some(upstream) = self.upstream.clone() else {
            return Err(Failure::Usage("--upstream is missing".into()));
        };
        let upstream_tls = self.tls()?;
        upstream.check_tls(&upstream_tls).map_err(|error| invalid("--upstream", &error))?;
        Ok(GatewayOptions {
            upstream_tls,
            rewrite_host: self.rewrite_host,
            trusted_proxies: self.trust_proxy.iter().cloned().collect(),
            ..GatewayOptions::new(self.listen, upstream)
        })
    }
}

impl NetworkArgs {
    fn tls(&self) -> Result<ClientTls, Failure> {
        let mut tls = tls::trusting("--upstream-ca", self.upstream_ca.as_deref())?;
        if let (Some(cert), Some(key)) = (&self.upstream_cert, &self.upstream_key) {
            let (chain, key_pem) = (read("--upstream-cert", cert)?, read("--upstream-key", key)?);
            tls = tls
                .with_identity(&chain, &key_pem)
                .map_err(|error| invalid(&doing("--upstream-cert", cert), &error))?;
        }
        Ok(tls)
    }
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Browsers")]
pub(crate) struct BrowserArgs {
    /// Pages of this origin may read refusals and replays: https://app.example, or * for any; say what the upstream says of
    /// its own replies; may be repeated
    #[arg(long, value_name = "ORIGIN")]
    cors_origin: Vec<String>,
    /// They may send credentials (Access-Control-Allow-Credentials)
    #[arg(long, requires = "cors_origin")]
    cors_credentials: bool,
}

impl BrowserArgs {
    pub(crate) fn cors(&self) -> Result<Option<Cors>, Failure> {
        if self.cors_origin.is_empty() {
            return Ok(None);
        }
        let cors = Cors::new(&self.cors_origin, self.cors_credentials);
        cors.map(Some).map_err(|error| Failure::Usage(format!("--cors-origin: {error}")))
    }
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Operations")]
pub(crate) struct AdminArgs {
    /// Where to serve /healthz, /readyz and /metrics, for example 127.0.0.1:9180; beyond this machine a token is needed
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    admin_listen: Option<SocketAddr>,
    /// A file with a token of at least 16 bytes, without which /metrics is refused: Authorization: Bearer TOKEN
    #[arg(long, value_name = "FILE", requires = "admin_listen")]
    admin_token_file: Option<PathBuf>,
}

impl AdminArgs {
    /// Where to listen and with which token, checked.
    pub(crate) fn listener(&self) -> Result<Option<(SocketAddr, Option<AdminToken>)>, Failure> {
        let Some(addr) = self.admin_listen else { return Ok(None) };
        let token = self.token()?;
        Admin::check(addr, token.as_ref())
            .map_err(|error| Failure::Usage(format!("--admin-listen: {error}; give --admin-token-file")))?;
        Ok(Some((addr, token)))
    }

    fn token(&self) -> Result<Option<AdminToken>, Failure> {
        let Some(path) = &self.admin_token_file else { return Ok(None) };
        let token = read("--admin-token-file", path)?;
        AdminToken::new(token.trim_ascii())
            .map(Some)
            .map_err(|error| Failure::Usage(format!("{}: {error}", doing("--admin-token-file", path))))
    }
}

fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        "write an IP address and a port, for example 127.0.0.1:8080, 0.0.0.0:8080 or [::]:8080".into()
    })
}
