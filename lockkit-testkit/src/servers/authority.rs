//! Certificates for servers and clients of a test.

use super::{Result, ServerError};
use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// A certificate authority made for the occasion, in a directory of its own. It needs the program `openssl`.
///
/// Dropping it removes all its files.
#[derive(Debug)]
pub struct Authority(tempfile::TempDir);

impl Authority {
    /// Makes an authority.
    ///
    /// # Errors
    ///
    /// If `openssl` is not installed, or fails.
    pub fn new() -> Result<Self> {
        let made = tempfile::Builder::new().prefix("lockkit-").tempdir().and_then(|directory| {
            let new = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=authority -keyout ca.key -out ca.crt";
            openssl(directory.path(), new)?;
            Ok(directory)
        });
        made.map(Self).map_err(|error| ServerError::io("could not make an authority", error))
    }

    /// Makes `<name>.key` and `<name>.crt`, and `<name>.pem` with both, for somebody who is reached at this machine. All
    /// are PEM; the keys are PKCS #8.
    ///
    /// # Errors
    ///
    /// If `openssl` fails.
    pub fn sign(&self, name: &str) -> Result<()> {
        let directory = self.0.path();
        let sign = || {
            openssl(
                directory,
                &format!("req -newkey rsa:2048 -nodes -subj /CN={name} -keyout {name}.key -out {name}.csr"),
            )?;
            fs::write(directory.join("names"), "subjectAltName=IP:127.0.0.1,DNS:localhost\n")?;
            let by = "-CA ca.crt -CAkey ca.key -CAcreateserial -extfile names";
            openssl(directory, &format!("x509 -req -days 2 -in {name}.csr {by} -out {name}.crt"))?;
            let both = [fs::read(self.file(&format!("{name}.key")))?, fs::read(self.file(&format!("{name}.crt")))?];
            fs::write(self.file(&format!("{name}.pem")), both.concat())
        };
        sign().map_err(|error| ServerError::io(format_args!("could not sign {name}"), error))
    }

    /// The path of a file: `ca.crt`, or one that was made by [`sign`](Self::sign).
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

fn openssl(directory: &Path, arguments: &str) -> io::Result<()> {
    let run = Command::new("openssl").args(arguments.split(' ')).current_dir(directory).stdin(Stdio::null()).output();
    let run = run.map_err(|error| io::Error::new(error.kind(), format!("openssl: {error}")))?;
    if run.status.success() {
        return Ok(());
    }
    Err(io::Error::other(String::from_utf8_lossy(&run.stderr).trim().to_owned()))
}
