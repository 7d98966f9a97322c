//! A copy of the workspace in which each safeguard can be switched off by name.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use crate::list::{Safeguard, all};

/// What names the safeguard that is off.
pub(crate) const OFF: &str = "LOCKKIT_SAFEGUARD_OFF";

/// Put into each library of the copy.
const SWITCH: &str = r#"
pub(crate) fn is_off(name: &str) -> bool {
    static OFF: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
    OFF.get_or_init(|| std::env::var("LOCKKIT_SAFEGUARD_OFF").ok()).as_deref() == Some(name)
}
"#;

pub(crate) fn workspace() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The source with a switch at each of its safeguards; one expression may have those of several.
pub(crate) fn switched(file: &str, source: &str) -> String {
    let mut places: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for safeguard in all().filter(|safeguard| safeguard.file == file) {
        places.entry(safeguard.place(source)).or_default().push(safeguard);
    }
    let mut text = source.to_owned();
    for ((start, end), safeguards) in places.into_iter().rev() {
        let code =
            safeguards.into_iter().fold(source[start..end].to_owned(), |code, Safeguard { name, without, .. }| {
                format!("(if crate::is_off({name:?}) {{ {without} }} else {{ {code} }})")
            });
        text.replace_range(start..end, &code);
    }
    // The switch is not const.
    text.replace("const fn ", "fn ")
}

impl Safeguard {
    /// Where in the source its expression begins and ends.
    fn place(&self, source: &str) -> (usize, usize) {
        let (before, rest) = self.code.split_once('«').expect("« before the expression");
        let (code, after) = rest.split_once('»').expect("» behind the expression");
        let whole = [before, code, after].concat();
        let found: Vec<_> = source.match_indices(&whole).collect();
        let [(at, _)] = found[..] else {
            panic!("{}: found {} times in {}: {whole}", self.name, found.len(), self.file);
        };
        (at + before.len(), at + before.len() + code.len())
    }
}

/// Copies what cargo needs into `to`, with the switches.
pub(crate) fn make(to: &Path) {
    let files: BTreeSet<_> = all().map(|safeguard| PathBuf::from(safeguard.file)).collect();
    let libraries: BTreeSet<_> = files.iter().filter_map(|file| file.iter().next()).collect();
    // A file of the facade begins with `src` itself.
    let root = |library| if library == "src" { Path::new("") } else { Path::new(library) };
    let libraries: BTreeSet<_> = libraries.into_iter().map(|library| root(library).join("src/lib.rs")).collect();
    copy(to, Path::new(""), &|path, mut content| {
        if files.contains(path) {
            let source = String::from_utf8(content).expect("source");
            content = switched(path.to_str().expect("name"), &source).into_bytes();
        }
        if libraries.contains(path) {
            // What replaces code leaves something unused.
            content = [b"#![allow(warnings)]\n", &*content, SWITCH.as_bytes()].concat();
        }
        content
    });
}

/// Copies a directory. What has not changed keeps its time, so that it is not compiled again; what is gone goes.
fn copy(to: &Path, directory: &Path, change: &dyn Fn(&Path, Vec<u8>) -> Vec<u8>) {
    fs::create_dir_all(to.join(directory)).expect("directory");
    for entry in fs::read_dir(to.join(directory)).expect("directory") {
        let former = entry.expect("entry");
        let still_there = workspace().join(directory).join(former.file_name());
        match former.path() {
            path if path.is_dir() && !still_there.is_dir() => fs::remove_dir_all(path).expect("a copy"),
            path if path.is_file() && !still_there.is_file() => fs::remove_file(path).expect("a copy"),
            _ => {}
        }
    }
    for entry in fs::read_dir(workspace().join(directory)).expect("directory") {
        let name = entry.expect("entry").file_name();
        let path = directory.join(&name);
        if name == "target" || name.to_string_lossy().starts_with('.') {
            continue;
        }
        if workspace().join(&path).is_dir() {
            copy(to, &path, change);
            continue;
        }
        let content = change(&path, fs::read(workspace().join(&path)).expect("file"));
        if fs::read(to.join(&path)).ok().as_ref() != Some(&content) {
            fs::write(to.join(&path), content).expect("file");
        }
    }
}
