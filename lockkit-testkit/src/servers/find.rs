//! Which server programs are installed, and where.

use super::{Result, ServerError};
use std::{
    env, fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

/// A server program to look for.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Program {
    /// What the system's package manager installed: a command on `PATH`, or in a directory for administrators, which
    /// users often do not have on their `PATH`.
    Installed {
        /// The command, such as `redis-server`.
        command: &'static str,
        /// The package that has it, for the error.
        package: &'static str,
    },
    /// A version that is newer than the system's: a command in the directory `$LOCKKIT_SERVERS`, or else in
    /// `lockkit-servers/bin` of the user's cache directory.
    Newer {
        /// The command, such as `valkey-server`.
        command: &'static str,
    },
    /// The program at this path.
    At(PathBuf),
}

/// An installed server program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Where the program is.
    pub path: PathBuf,
    /// Its version, such as `7.0.15`.
    pub version: String,
}

impl Program {
    /// Looks for the program and asks it for its version.
    ///
    /// # Errors
    ///
    /// If it is not installed (the text says how to get it), or does not say its version.
    pub fn find(&self) -> Result<Found> {
        let path = self.locate()?;
        let failed = |source| ServerError::io(format_args!("could not run {} --version", path.display()), source);
        let output = Command::new(&path).arg("--version").output().map_err(failed)?;
        let text = String::from_utf8_lossy(&output.stdout);
        match version(&text) {
            Some(version) => Ok(Found { version: version.to_owned(), path }),
            None => Err(failed(std::io::Error::other(format!("no version in {text:?}")))),
        }
    }

    /// Looks for the program without running it.
    pub(crate) fn locate(&self) -> Result<PathBuf> {
        match self {
            Self::Installed { command, package } => {
                let path = env::var_os("PATH").unwrap_or_default();
                env::split_paths(&path)
                    .chain(["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from))
                    .map(|dir| dir.join(command))
                    .find(|path| is_program(path))
                    .ok_or_else(|| ServerError::missing(format!("no {command} on PATH: apt-get install {package}")))
            }
            Self::Newer { command } => {
                let dir = newer_servers().ok_or_else(|| {
                    ServerError::missing(format!("nowhere to look for a newer {command}: set LOCKKIT_SERVERS"))
                })?;
                Some(dir.join(command)).filter(|path| is_program(path)).ok_or_else(|| {
                    ServerError::missing(format!(
                        "no {command} in {}: put the program, or a script that `exec`s it, there, or set LOCKKIT_SERVERS \
                         to the directory that has it",
                        dir.display()
                    ))
                })
            }
            Self::At(path) => Some(path.clone())
                .filter(|path| is_program(path))
                .ok_or_else(|| ServerError::missing(format!("{} is not a program", path.display()))),
        }
    }
}

/// An archive of a server that runs on a virtual machine, such as a `.jar`.
pub(super) fn archive(path: &Path, package: &str) -> Result<PathBuf> {
    Some(path.to_owned())
        .filter(|path| path.is_file())
        .ok_or_else(|| ServerError::missing(format!("no {}: apt-get install {package}", path.display())))
}

/// The same of a version that is newer than the system's: in the directory of such servers, or in the tree of a package
/// that was unpacked next to it.
pub(super) fn newer_archive(name: &str) -> Result<PathBuf> {
    let dir = newer_servers()
        .ok_or_else(|| ServerError::missing(format!("nowhere to look for a newer {name}: set LOCKKIT_SERVERS")))?;
    let places = [dir.join(name), dir.join("../tree/usr/share/java").join(name)];
    places.into_iter().find(|path| path.is_file()).ok_or_else(|| {
        ServerError::missing(format!(
            "no {name} in {}: put the archive with its libraries there, or set LOCKKIT_SERVERS to the directory that has it",
            dir.display()
        ))
    })
}

/// The directory of servers that are newer than the system's.
fn newer_servers() -> Option<PathBuf> {
    // An empty variable counts as unset, as the XDG base directory specification has it.
    let var = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    var("LOCKKIT_SERVERS").or_else(|| {
        let cache = var("XDG_CACHE_HOME").or_else(|| Some(var("HOME")?.join(".cache")))?;
        Some(cache.join("lockkit-servers").join("bin"))
    })
}

fn is_program(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// The first dotted number in what a server prints about itself.
///
/// That fits `Redis server v=7.0.15 sha=0` as well as `mariadbd  Ver 10.11.19-MariaDB`.
fn version(text: &str) -> Option<&str> {
    text.split(|c: char| !c.is_ascii_digit() && c != '.')
        .map(|number| number.trim_matches('.'))
        .find(|number| number.contains('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_read_from_what_servers_print() {
        assert_eq!(version("Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64"), Some("7.0.15"));
        assert_eq!(version("mariadbd  Ver 10.11.19-MariaDB for debian-linux-gnu on x86_64"), Some("10.11.19"));
        assert_eq!(version("no number. at all 7"), None);
    }

    #[test]
    fn what_is_missing_is_said_with_the_remedy() {
        let program = Program::Installed { command: "no-such-server", package: "no-such-package" };
        let error = program.find().expect_err("there is no such program");
        assert!(error.is_missing());
        assert_eq!(error.to_string(), "no no-such-server on PATH: apt-get install no-such-package");
        assert!(Program::At("/dev/null".into()).find().expect_err("not a program").is_missing());
    }
}
