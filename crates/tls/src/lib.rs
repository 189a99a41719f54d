//! TLS as a client: whom a server is trusted by, and with which certificate it knows us.
//!
//! For the doors that call a service: the gateway its upstream, the inbox the service that works on messages. The databases'
//! drivers have ways of their own.

use std::fmt;
use std::io;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Whom a server is trusted by, and with which certificate it knows us.
#[derive(Clone, Default)]
pub struct ClientTls {
    roots: Roots,
    identity: Option<Arc<Identity>>,
}

#[derive(Clone, Default)]
enum Roots {
    /// Those of the system.
    #[default]
    Native,
    These(Arc<RootCertStore>),
}

struct Identity {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

/// Why TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidTls {
    /// The file with certificates or a key is not one.
    #[error("not a PEM file of what is needed")]
    Pem(#[source] rustls::pki_types::pem::Error),
    /// There is none in the file.
    #[error("there is no certificate in it")]
    NoCertificate,
    /// The system has no roots where they are looked for.
    #[error("the system has no certificate authorities (install ca-certificates, or name a file)")]
    NoNativeRoots,
    /// A certificate or a key that does not work, alone or together.
    #[error("a certificate or key cannot be used")]
    Unusable(#[source] rustls::Error),
    /// No certificate can be for that host.
    #[error("{0:?} is not a name that a certificate can have")]
    Host(String),
}

impl ClientTls {
    /// Trusts the certificate authorities of this PEM file alone, instead of those of the system.
    ///
    /// # Errors
    /// [`InvalidTls`].
    pub fn with_roots(mut self, pem: &[u8]) -> Result<Self, InvalidTls> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates(pem)? {
            roots.add(certificate).map_err(InvalidTls::Unusable)?;
        }
        self.roots = Roots::These(Arc::new(roots));
        Ok(self)
    }

    /// Shows this certificate (a chain, the own one first) with its private key to a server that asks for one.
    ///
    /// # Errors
    /// [`InvalidTls`].
    pub fn with_identity(mut self, chain: &[u8], key: &[u8]) -> Result<Self, InvalidTls> {
        let chain = certificates(chain)?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(InvalidTls::Pem)?;
        self.identity = Some(Arc::new(Identity { chain, key }));
        Ok(self)
    }

    /// For connections to one host (a name or an address, without brackets) that speak one protocol, named as ALPN does.
    ///
    /// # Errors
    /// [`InvalidTls`].
    pub fn connector(&self, host: &str, protocol: &[u8]) -> Result<Connector, InvalidTls> {
        let name = ServerName::try_from(host.to_owned()).map_err(|_| InvalidTls::Host(host.to_owned()))?;
        let roots = match &self.roots {
            Roots::These(roots) => roots.clone(),
            Roots::Native => Arc::new(native_roots()?),
        };
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(InvalidTls::Unusable)?
            .with_root_certificates(roots);
        let mut config = match &self.identity {
            None => builder.with_no_client_auth(),
            Some(identity) => builder
                .with_client_auth_cert(identity.chain.clone(), identity.key.clone_key())
                .map_err(InvalidTls::Unusable)?,
        };
        config.alpn_protocols = vec![protocol.to_vec()];
        Ok(Connector { tls: TlsConnector::from(Arc::new(config)), name })
    }
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, InvalidTls> {
    let certificates: Vec<_> =
        CertificateDer::pem_slice_iter(pem).collect::<Result<_, _>>().map_err(InvalidTls::Pem)?;
    if certificates.is_empty() { Err(InvalidTls::NoCertificate) } else { Ok(certificates) }
}

fn native_roots() -> Result<RootCertStore, InvalidTls> {
    let mut roots = RootCertStore::empty();
    // One that cannot be read is one less to trust.
    let (usable, _) = roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if usable == 0 { Err(InvalidTls::NoNativeRoots) } else { Ok(roots) }
}

/// Begins TLS with one host.
#[derive(Clone)]
pub struct Connector {
    tls: TlsConnector,
    name: ServerName<'static>,
}

impl Connector {
    /// Shakes hands: afterwards the server is who it should be.
    ///
    /// # Errors
    /// When it is not, does not speak TLS, or goes away.
    pub async fn connect(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        self.tls.connect(self.name.clone(), stream).await
    }
}

impl fmt::Debug for ClientTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let roots = match &self.roots {
            Roots::Native => "native".to_owned(),
            Roots::These(roots) => format!("{} given", roots.len()),
        };
        let identity = self.identity.as_ref().map(|_| "…");
        f.debug_struct("ClientTls").field("roots", &roots).field("identity", &identity).finish()
    }
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector").field("name", &self.name).finish_non_exhaustive()
    }
}
