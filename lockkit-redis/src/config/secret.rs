//! Who to log in as, with a password that is given, or that is looked up each time it is needed.

use std::{env, fmt, fs, path::PathBuf};

use lockkit_core::{Error, ErrorKind, Result, url_options::Hidden};
use redis::{ProtocolVersion, RedisConnectionInfo};

/// Where a password comes from. It is never shown.
#[derive(Clone)]
pub(crate) enum Secret {
    /// The password itself.
    Given(String),
    /// The environment variable that has it, and the option that names it.
    Env { option: &'static str, name: String },
    /// The file that has it, read at each connect, so that a new password in it is used from the next one on; and the
    /// option that names it.
    File { option: &'static str, path: PathBuf },
}

impl Secret {
    /// The password as it is now. A file's last line end does not count.
    ///
    /// # Errors
    /// [`ErrorKind::Misconfigured`] if it can't be read. The error has the name of the option, not what was given with it: that
    /// may be the password itself, given where its place was asked for.
    pub(crate) fn read(&self) -> Result<String> {
        let missing = |what: String| Error::new(ErrorKind::Misconfigured, what);
        match self {
            Self::Given(password) => Ok(password.clone()),
            Self::Env { option, name } => env::var(name).map_err(|_| {
                missing(format!("the environment variable that {option} names is not set, or is no text"))
            }),
            Self::File { option, path } => {
                let text = fs::read_to_string(path)
                    .map_err(|e| missing(format!("can't read the file that {option} names: {e}")))?;
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
            Self::Env { option, .. } | Self::File { option, .. } => write!(f, "{option}=.."),
        }
    }
}

/// The user to log in as.
#[derive(Clone, Debug, Default)]
pub(crate) struct Login {
    /// It may be a password that was given in its place, as in `redis://secret@host`.
    pub(crate) username: Hidden<String>,
    pub(crate) password: Option<Secret>,
}

impl Login {
    /// How to log in. Passwords that are kept elsewhere are read now.
    ///
    /// # Errors
    /// `Misconfigured` if the password can't be read.
    pub(crate) fn read(&self, database: u32) -> Result<RedisConnectionInfo> {
        let mut info = RedisConnectionInfo::default()
            .set_protocol(ProtocolVersion::RESP3)
            .set_db(database.into())
            .set_lib_name("lockkit", env!("CARGO_PKG_VERSION"));
        if let Some(username) = &*self.username {
            info = info.set_username(username);
        }
        if let Some(password) = &self.password {
            info = info.set_password(password.read()?);
        }
        Ok(info)
    }
}
