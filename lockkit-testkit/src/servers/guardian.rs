//! The small process that stands between a test and its server, so that no server outlives its test.
//!
//! A `Drop` does not run when the test process is killed. So the server is the child of a shell that waits for orders
//! on its standard input, whose other end only the test process holds. However that process ends, the kernel closes the
//! pipe, the shell reads the end of its input, kills the server and removes its directory.
//!
//! (The parent-death signal of Linux would not do: it comes already when the *thread* that started the server ends.)

use std::{
    ffi::OsString,
    io::{self, BufRead, BufReader, Write},
    os::unix::process::CommandExt,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use super::Location;

/// Nothing but the end of its input may end the guardian. SIGHUP would, and it comes just when it is least wanted: when
/// the test dies while the server is frozen, for then the two are an orphaned process group with a stopped member, and
/// that is what the kernel does to one.
///
/// SIGKILL works on a frozen server too. After the `wait` the whole server is gone, with all its threads and sockets,
/// and until then its number can't be given to another process.
const SCRIPT: &str = r#"
dir=$1 log=$2
shift 2
trap '' HUP INT TERM
server=
stop() {
    if [ -n "$server" ]; then
        kill -9 "$server"
        wait "$server"
        server=
    fi
}
while read -r order; do
    stop
    case $order in
        start)
            { trap - HUP INT TERM; exec "$@"; } </dev/null >>"$log" 2>&1 &
            server=$!
            echo "$server"
            ;;
        stop) echo stopped ;;
    esac
done
stop
rm -rf "$dir"
"#;

/// The guardian of one server; dropping it ends the server and removes its directory.
#[derive(Debug)]
pub(super) struct Guardian {
    shell: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Guardian {
    /// A guardian for the server that `command` starts in `location`, which is not running yet.
    pub(super) fn new(location: &Location, command: &[OsString]) -> io::Result<Self> {
        let mut shell = Command::new("/bin/sh")
            .args(["-c", SCRIPT, "lockkit-guardian"])
            .args([&location.dir, &location.log])
            .args(command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            // What is sent to the whole group of the test, such as a Ctrl-C, must not end the guardian before its work
            // is done.
            .process_group(0)
            .spawn()?;
        let orders = shell.stdin.take();
        let answers = BufReader::new(shell.stdout.take().expect("stdout was asked to be piped"));
        Ok(Self { shell, orders, answers })
    }

    /// Starts the server, killing it first if it runs, and returns its process number.
    pub(super) fn start(&mut self) -> io::Result<u32> {
        self.order("start")?.parse().map_err(io::Error::other)
    }

    /// Kills the server if it runs, and returns when it is gone.
    pub(super) fn stop(&mut self) -> io::Result<()> {
        self.order("stop").map(drop)
    }

    fn order(&mut self, order: &str) -> io::Result<String> {
        let mut orders = self.orders.as_ref().expect("orders are open until the guardian is dropped");
        orders.write_all(format!("{order}\n").as_bytes())?;
        let mut answer = String::new();
        match self.answers.read_line(&mut answer)? {
            0 => Err(io::Error::new(io::ErrorKind::BrokenPipe, "the guardian process is gone")),
            _ => Ok(answer.trim_end().to_owned()),
        }
    }
}

impl Drop for Guardian {
    fn drop(&mut self) {
        // Waiting takes as long as the kernel needs to bury the server: some milliseconds, during which a test that has
        // ended has nothing better to do. In return a dropped server is a server that is gone.
        drop(self.orders.take());
        let _ = self.shell.wait();
    }
}
