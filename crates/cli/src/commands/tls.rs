//! Files of certificates that options name, for the commands that call a service.

use std::path::Path;

use onlyonce_gateway::{ClientTls, InvalidTls};

use crate::failure::{self, Failure};

/// Trusts the authorities of the file that the option names, or those of the system.
pub(crate) fn trusting(option: &str, file: Option<&Path>) -> Result<ClientTls, Failure> {
    let Some(path) = file else { return Ok(ClientTls::default()) };
    let pem = read(option, path)?;
    ClientTls::default().with_roots(&pem).map_err(|error| invalid(&doing(option, path), &error))
}

/// An option with the file that it names.
pub(crate) fn doing(option: &str, path: &Path) -> String {
    format!("{option} {}", path.display())
}

pub(crate) fn read(option: &str, path: &Path) -> Result<Vec<u8>, Failure> {
    std::fs::read(path).map_err(|error| Failure::io(&doing(option, path), &error))
}

pub(crate) fn invalid(what: &str, error: &InvalidTls) -> Failure {
    Failure::Usage(format!("{what}: {}", failure::chain(error)))
}
