//! Who to log in as, with a password that is given, or that is looked up each time it is needed.

use std::{env, fmt, fs, path::PathBuf};

use lockkit_core::{Error, ErrorKind, Result};
use redis::{ProtocolVersion, RedisConnectionInfo};

use crate::config::Login;

/// Where a password comes from. It is never shown.
#[derive(Clone)]
pub(crate) enum Secret {
    /// The password itself.
    Given(String),
    /// The environment variable that has it.
    Env(String),
    /// The file that has it, read at each connect, so that a new password in it is used from the next one on.
    File(PathBuf),
}

impl Secret {
    /// The password as it is now. A file's last line end does not count.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if it can't be read; the error has the name of the place, not what is there.
    pub(crate) fn read(&self) -> Result<String> {
        let missing = |what: String| Error::new(ErrorKind::InvalidInput, what);
        match self {
            Self::Given(password) => Ok(password.clone()),
            Self::Env(name) => env::var(name)
                .map_err(|_| missing(format!("the password's environment variable {name} is not set, or is no text"))),
            Self::File(path) => {
                let text = fs::read_to_string(path)
                    .map_err(|e| missing(format!("can't read the password file {}: {e}", path.display())))?;
                let line = text.strip_suffix('\n').unwrap_or(&text);
                Ok(line.strip_suffix('\r').unwrap_or(line).to_owned())
            }
        }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Given(_) => f.write_str(".."),
            Self::Env(name) => write!(f, "env {name}"),
            Self::File(path) => write!(f, "file {}", path.display()),
        }
    }
}

/// How to log in. Passwords that are kept elsewhere are read now.
///
/// # Errors
/// `InvalidInput` if the password can't be read.
pub(crate) fn login(login: &Login, database: u32) -> Result<RedisConnectionInfo> {
    let mut info = RedisConnectionInfo::default()
        .set_protocol(ProtocolVersion::RESP3)
        .set_db(database.into())
        .set_lib_name("lockkit", env!("CARGO_PKG_VERSION"));
    if let Some(username) = &login.username {
        info = info.set_username(username);
    }
    if let Some(password) = &login.password {
        info = info.set_password(password.read()?);
    }
    Ok(info)
}
