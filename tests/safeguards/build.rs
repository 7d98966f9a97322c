//! The tests of the copy: how they are built and run.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{Read as _, Seek as _},
    path::PathBuf,
    process::{Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::copy::{OFF, make, workspace};

/// The directory of the copy, which is that of the facade.
const COPY: &str = "safeguards";

/// A test that takes this much longer than it does with all safeguards on has noticed something, too.
const LONGER: Duration = Duration::from_secs(120);

/// A single test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Test {
    package: &'static str,
    /// The name of a file in `tests`, or `lib`.
    target: &'static str,
    name: &'static str,
}

/// How a test ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Passed,
    Failed,
    /// It was stopped after a long time.
    Hung,
    /// There is no such test, or its server is not installed.
    Missing,
}

/// The copy, built.
pub(crate) struct Build {
    /// The program of each package and target, and the directory to run it in.
    programs: BTreeMap<(String, String), (PathBuf, PathBuf)>,
}

impl Test {
    /// Reads `package/target::name`.
    pub(crate) fn of(text: &'static str) -> Self {
        let (place, name) = text.split_once("::").expect("package/target::name");
        let (package, target) = place.split_once('/').expect("package/target::name");
        Self { package, target, name }
    }
}

impl Build {
    /// Copies the workspace and builds what these tests are in.
    pub(crate) fn of(tests: &BTreeSet<Test>) -> Self {
        let copy = workspace().join("target").join(COPY);
        make(&copy);
        let mut cargo = Command::new(env!("CARGO"));
        // Its programs have a directory of their own: in that of the workspace they would be taken for the workspace's, and those for them.
        cargo.current_dir(&copy).arg("test").env_remove("CARGO_TARGET_DIR");
        cargo.args(["--no-run", "--all-features", "--lib", "--message-format", "json-render-diagnostics"]);
        let packages: BTreeSet<_> = tests.iter().map(|test| test.package).collect();
        for package in packages {
            cargo.args(["--package", package]);
        }
        let targets: BTreeSet<_> = tests.iter().map(|test| test.target).filter(|target| *target != "lib").collect();
        for target in targets {
            cargo.args(["--test", target]);
        }
        let output = cargo.stderr(Stdio::inherit()).output().expect("cargo");
        assert!(output.status.success(), "the copy does not compile");
        let lines = output.stdout.split(|byte| *byte == b'\n');
        Self { programs: lines.filter_map(|line| program(&serde_json::from_slice(line).ok()?)).collect() }
    }

    /// Runs a test with one safeguard off, or none. `usual` is how long it takes with none.
    pub(crate) fn run(&self, test: &Test, off: Option<&str>, usual: Duration) -> Ended {
        let place = (test.package.to_owned(), test.target.to_owned());
        let (program, directory) = self.programs.get(&place).unwrap_or_else(|| panic!("there is no {place:?}"));
        let mut output = tempfile::tempfile().expect("file");
        let mut child = Command::new(program)
            .args(["--exact", test.name])
            .current_dir(directory)
            .envs(off.map(|name| (OFF, name)))
            .stdout(output.try_clone().expect("file"))
            .stderr(Stdio::null())
            .spawn()
            .expect("test");
        let start = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().expect("test") {
                break status;
            }
            if start.elapsed() > usual + LONGER {
                drop(child.kill());
                drop(child.wait());
                return Ended::Hung;
            }
            sleep(Duration::from_millis(20));
        };
        if !status.success() {
            return Ended::Failed;
        }
        let mut text = String::new();
        output.rewind().and_then(|()| output.read_to_string(&mut text)).expect("output");
        if text.contains("1 passed") { Ended::Passed } else { Ended::Missing }
    }
}

/// A test program, from what cargo tells of it.
fn program(message: &Value) -> Option<((String, String), (PathBuf, PathBuf))> {
    let (program, target) = (message["executable"].as_str()?, &message["target"]);
    let directory = PathBuf::from(message["manifest_path"].as_str()?).parent()?.to_owned();
    let name = directory.file_name()?.to_str()?;
    let package = if name == COPY { "lockkit" } else { name };
    let target = if target["kind"][0] == "test" { target["name"].as_str()? } else { "lib" };
    Some(((package.to_owned(), target.to_owned()), (program.into(), directory)))
}
