//! A certificate authority of one test, for servers that speak TLS.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

/// Signs certificates; nobody trusts it unless told to. Made by the `openssl` program.
#[derive(Debug)]
pub struct Authority {
    folder: TempDir,
}

/// A certificate and its key, as PEM.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The certificate.
    pub cert: String,
    /// Its key.
    pub key: String,
}

impl Default for Authority {
    fn default() -> Self {
        Self::new()
    }
}

impl Authority {
    /// Makes a new one.
    ///
    /// # Panics
    /// When `openssl` is not there or refuses.
    pub fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"];
        let usage = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"];
        let named = ["req", "-x509", "-days", "2", "-subj", "/CN=testkit authority"];
        let files = ["-keyout", "ca.key", "-out", "ca.pem"];
        openssl(folder.path(), &[&named[..], &curve, &usage, &files].concat());
        Self { folder }
    }

    /// The file with its certificate.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("ca.pem")
    }

    /// Its certificate, as PEM.
    ///
    /// # Panics
    /// When it cannot be read.
    pub fn pem(&self) -> String {
        read(&self.path())
    }

    /// A certificate for `name`, in the form of openssl: `IP:127.0.0.1`, `DNS:db.example`.
    ///
    /// # Panics
    /// When `openssl` refuses.
    pub fn identity(&self, name: &str) -> Identity {
        let place = tempfile::tempdir_in(self.folder.path()).expect("a temporary folder");
        let at = |file: &str| place.path().join(file).display().to_string();
        let (key, request, cert) = (at("key"), at("request"), at("cert"));
        let curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"];
        let named = ["req", "-new", "-subj", "/CN=testkit", "-keyout", &key, "-out", &request];
        openssl(self.folder.path(), &[&named[..], &curve].concat());
        let extensions = at("extensions");
        let usage = format!("subjectAltName={name}\nextendedKeyUsage=serverAuth,clientAuth\n");
        std::fs::write(&extensions, usage).expect("a file in a temporary folder");
        let sign = ["x509", "-req", "-days", "2", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"];
        let files = ["-in", &request, "-out", &cert, "-extfile", &extensions];
        openssl(self.folder.path(), &[&sign[..], &files].concat());
        Identity { cert: read(Path::new(&cert)), key: read(Path::new(&key)) }
    }
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn openssl(folder: &Path, args: &[&str]) {
    let mut command = Command::new("openssl");
    let done = command.args(args).current_dir(folder).stdin(Stdio::null()).output();
    let done = done.unwrap_or_else(|error| panic!("openssl ({error}); ./test installs what the tests need"));
    assert!(done.status.success(), "openssl {args:?}: {}", String::from_utf8_lossy(&done.stderr));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_signs_is_its_own() {
        let (one, two) = (Authority::new(), Authority::new());
        let identity = one.identity("IP:127.0.0.1");
        let place = tempfile::tempdir().expect("a temporary folder");
        std::fs::write(place.path().join("cert"), &identity.cert).expect("a file");
        assert!(identity.key.contains("PRIVATE KEY"));
        let verifies = |by: &Authority| {
            let verify = Command::new("openssl")
                .arg("verify")
                .arg("-CAfile")
                .arg(by.path())
                .arg("cert")
                .current_dir(place.path())
                .output();
            verify.expect("openssl runs").status.success()
        };
        assert!(verifies(&one) && !verifies(&two));
    }
}
