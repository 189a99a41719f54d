//! TLS as libpq's `sslmode` says it, through rustls.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use onlyonce_core::StoreErrorKind;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};
use tokio_postgres::config::SslMode;

use crate::error::Fault;

/// How the connection is protected.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tls {
    pub(crate) mode: Mode,
    /// `sslrootcert`: a file of certificates in PEM; the system's own when there is none.
    pub(crate) roots: Option<PathBuf>,
    /// `sslcert` and `sslkey`: what this client shows.
    pub(crate) identity: Option<(PathBuf, PathBuf)>,
}

/// As in libpq.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Mode {
    Disable,
    /// Encrypted where the server can; nothing is verified. Libpq's default.
    #[default]
    Prefer,
    /// Encrypted; verified like `verify-ca` when `sslrootcert` is given, else not at all.
    Require,
    /// The certificate comes from a root that is trusted.
    VerifyCa,
    /// And is that of the host.
    VerifyFull,
}

impl Mode {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "disable" => Self::Disable,
            "prefer" => Self::Prefer,
            "require" => Self::Require,
            "verify-ca" => Self::VerifyCa,
            "verify-full" => Self::VerifyFull,
            _ => return None,
        })
    }

    /// Whether TLS is asked of the server.
    pub(crate) fn for_driver(self) -> SslMode {
        match self {
            Self::Disable => SslMode::Disable,
            Self::Prefer => SslMode::Prefer,
            Self::Require | Self::VerifyCa | Self::VerifyFull => SslMode::Require,
        }
    }
}

impl Tls {
    /// The settings for rustls. Reads the files.
    ///
    /// # Errors
    /// `Unfit` when a file cannot be read or holds nothing of use.
    pub(crate) fn config(&self) -> Result<ClientConfig, Fault> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let verifier: Arc<dyn ServerCertVerifier> = match (self.mode, &self.roots) {
            (Mode::Disable | Mode::Prefer, _) | (Mode::Require, None) => {
                Arc::new(AnyCertificate(Arc::clone(&provider)))
            }
            (Mode::Require | Mode::VerifyCa, _) => Arc::new(AnyName(self.verifier(&provider)?)),
            (Mode::VerifyFull, _) => self.verifier(&provider)?,
        };
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| unfit("TLS cannot be set up".into()).with_source(error))?
            .dangerous()
            .with_custom_certificate_verifier(verifier);
        match &self.identity {
            None => Ok(builder.with_no_client_auth()),
            Some((certificate, key)) => {
                let chain = certificates(certificate)?;
                let private = PrivateKeyDer::from_pem_file(key)
                    .map_err(|error| unreadable("sslkey", key).with_source(error))?;
                builder
                    .with_client_auth_cert(chain, private)
                    .map_err(|error| unfit("sslcert and sslkey do not fit".into()).with_source(error))
            }
        }
    }

    fn verifier(&self, provider: &Arc<CryptoProvider>) -> Result<Arc<WebPkiServerVerifier>, Fault> {
        let mut roots = RootCertStore::empty();
        let found = match &self.roots {
            Some(path) => certificates(path)?,
            None => rustls_native_certs::load_native_certs().certs,
        };
        let (added, _) = roots.add_parsable_certificates(found);
        if added == 0 {
            let place = self.roots.as_deref().map_or("the system".into(), |path| path.display().to_string());
            return Err(unfit(format!(
                "no root certificate is found in {place}; name a file by `sslrootcert=`"
            )));
        }
        WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider))
            .build()
            .map_err(|error| unfit("the root certificates cannot be used".into()).with_source(error))
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Fault> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => Err(unfit(format!("{} holds no certificate in PEM", path.display()))),
        Err(error) => Err(unreadable("certificates", path).with_source(error)),
    }
}

fn unreadable(what: &str, path: &Path) -> Fault {
    unfit(format!("{what}: {} cannot be read", path.display()))
}

fn unfit(detail: String) -> Fault {
    Fault::new(StoreErrorKind::Unfit, detail)
}

/// Encryption alone: whoever answers is taken for the server, as libpq does in these modes.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signed, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// The chain is verified, the name is not.
#[derive(Debug)]
struct AnyName(Arc<WebPkiServerVerifier>);

impl ServerCertVerifier for AnyName {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        // The name is looked at last, when the chain has been found good.
        match self.0.verify_server_cert(certificate, chain, name, ocsp, now) {
            Err(Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}
