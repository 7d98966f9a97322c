//! comparison.html, in the browser that people have.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use lockkit_testkit::servers::{RedisOptions, RedisServer};

/// Chromium, which `./run test` installs.
fn chromium() -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|dir| dir.join("chromium")).find(|at| at.exists());
    found.expect("chromium is not installed; Debian's package is called chromium")
}

/// What the browser makes of a page, and what it says on its console.
fn opened(chromium: &Path, profile: &Path, page: &Path, address: &str, width: u32) -> (String, String) {
    let size = format!("--window-size={width},900");
    let output = browse(chromium, profile, &["--enable-logging=stderr", "--dump-dom", &size], page, address);
    let log = String::from_utf8_lossy(&output.stderr);
    let console = log.lines().filter(|line| line.contains("CONSOLE")).collect::<Vec<_>>().join("\n");
    (String::from_utf8(output.stdout).expect("UTF-8"), console)
}

fn browse(chromium: &Path, profile: &Path, args: &[&str], page: &Path, address: &str) -> Output {
    let output = Command::new(chromium)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"])
        .args(["--disable-background-networking", "--disable-component-update"])
        .args(args)
        .arg(format!("--user-data-dir={}", profile.display()))
        .arg(format!("file://{}#{address}", page.display()))
        .output()
        .expect("chromium runs");
    assert!(output.status.success(), "{output:?}");
    output
}

/// What a script that runs at the end of the page puts into its title.
fn told(chromium: &Path, dir: &Path, args: &[&str], page: &Path, script: &str) -> String {
    let with_script = dir.join("with-script.html");
    let script = format!("<script>document.title = {script}</script></body>");
    fs::write(&with_script, fs::read_to_string(page).expect("a page").replace("</body>", &script)).expect("written");
    let output = browse(chromium, &dir.join("profile"), &[args, &["--dump-dom"]].concat(), &with_script, "");
    title(&String::from_utf8(output.stdout).expect("UTF-8")).to_owned()
}

fn title(dom: &str) -> &str {
    dom.split("<title>").nth(1).and_then(|rest| rest.split("</title>").next()).expect("a title")
}

/// The stores as the answers sort them, each with what speaks against it.
fn sorted(dom: &str) -> Vec<(String, bool)> {
    let answer = dom.split("id=\"answer\"").nth(1).and_then(|rest| rest.split("</ol>").next()).expect("an answer");
    let items = answer.split("<strong>").skip(1).map(|item| {
        let (name, reasons) = item.split_once("</strong>").expect("a name");
        (name.to_owned(), reasons.contains("class=\"no\""))
    });
    items.collect()
}

/// A quick comparison of the store in memory with this one, and its page.
fn compare(dir: &Path, store: &str, args: &[&str]) -> PathBuf {
    let output = Command::new(env!("CARGO_BIN_EXE_lockkit"))
        .args(["compare", "--quick", "--leases", "50", "--store", store, "--out"])
        .arg(dir)
        .args(args)
        .env_remove("LOCKKIT_STORE")
        .output()
        .expect("lockkit runs");
    assert!(output.status.success(), "{output:?}");
    dir.join("comparison.html")
}

/// The widths of the page and of a phone that shows it: a frame, for a window of this browser is never that narrow.
fn on_a_phone(chromium: &Path, dir: &Path, page: &Path) -> (u32, u32) {
    let phone = dir.join("phone.html");
    let whole = fs::read_to_string(page).expect("a page").replace('&', "&amp;").replace('"', "&quot;");
    let measure = "const root = this.contentDocument.documentElement; document.title = root.scrollWidth + ' in ' + root.clientWidth";
    let frame =
        format!("<iframe style='width:360px;height:640px;border:0' onload=\"{measure}\" srcdoc=\"{whole}\"></iframe>");
    fs::write(&phone, format!("<!doctype html><title></title>{frame}")).expect("written");
    let (dom, _) = opened(chromium, &dir.join("profile"), &phone, "", 1200);
    let (wide, within) = title(&dom).split_once(" in ").expect("two widths");
    (wide.parse().expect("a number"), within.parse().expect("a number"))
}

fn assert_it_fits_a_phone(chromium: &Path, dir: &Path, page: &Path) {
    let (wide, within) = on_a_phone(chromium, dir, page);
    assert!(wide == within && (300..=360).contains(&within), "{wide} in {within}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_of_a_part_has_nothing_of_the_rest() {
    let chromium = chromium();
    let server = RedisServer::start(RedisOptions::default()).await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let open = |page: &Path| opened(&chromium, &dir.path().join("profile"), page, "", 1200);

    let page = compare(dir.path(), &server.url(), &["--only", "alone"]);
    let (dom, console) = open(&page);
    assert_eq!((console.as_str(), dom.matches("<svg").count()), ("", 2), "acquire and release");
    assert_eq!(sorted(&dom).len(), 2);
    assert!(dom.contains("name=\"time\"") && !dom.contains("id=\"cases\""), "{dom}");
    assert_it_fits_a_phone(&chromium, dir.path(), &page);

    let page = compare(dir.path(), &server.url(), &["--only", "hot"]);
    let (dom, console) = open(&page);
    assert_eq!((console.as_str(), dom.matches("<svg").count()), ("", 0));
    assert_eq!(sorted(&dom).len(), 2);
    assert!(!dom.contains("id=\"charts\"") && !dom.contains("name=\"time\""), "{dom}");
    // Its tasks ask the store one at a time.
    assert!(dom.contains("Whether a lock lets two in at once was not measured."), "{dom}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_works_in_a_browser() {
    let chromium = chromium();
    let server = RedisServer::start(RedisOptions::default().password("s3cret")).await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let page = compare(dir.path(), &server.url(), &["--skip", "compliance"]);
    assert!(!fs::read_to_string(&page).unwrap().contains("s3cret"));
    let open = |page: &Path, answers: &str, width| opened(&chromium, &dir.path().join("profile"), page, answers, width);

    let (dom, console) = open(&page, "", 1200);
    assert_eq!(console, "");
    assert_eq!(dom.matches("<svg").count(), 4, "a chart for each curve");
    let unanswered = sorted(&dom);
    let redis = unanswered[0].0.clone();
    assert!(redis.contains("redis"), "{unanswered:?}");
    assert_eq!(unanswered, [(redis.clone(), false), ("memory".to_owned(), true)], "other processes can't share memory");
    // Answers in the address.
    let one_process = [("memory".to_owned(), false), (redis.clone(), false)];
    assert_eq!(sorted(&open(&page, "where=one", 1200).0), one_process);
    assert_eq!(
        sorted(&open(&page, "where=one&loss=yes", 1200).0)[1],
        (redis.clone(), true),
        "it may grant a lock twice then"
    );
    let run_already = sorted(&open(&page, "where=one&run=redis", 1200).0);
    assert_eq!(run_already[0], (redis.clone(), false), "of two that fit, the one that runs already");
    let cluster = dir.path().join("cluster.html");
    let (before, after) = (r#""scheme":"redis""#, r#""scheme":"redis+cluster""#);
    let text = fs::read_to_string(&page).unwrap();
    assert!(text.contains(before));
    fs::write(&cluster, text.replace(before, after)).unwrap();
    let several = sorted(&open(&cluster, "where=one&run=redis", 1200).0);
    assert_eq!(several[0], (redis, false), "several servers of a kind are of that kind");

    // Answers that are clicked.
    let clicked = dir.path().join("clicked.html");
    let click = "<script>document.querySelector('[name=where][value=one]').click();\
        document.title = location.hash</script></body>";
    fs::write(&clicked, fs::read_to_string(&page).unwrap().replace("</body>", click)).unwrap();
    let (dom, console) = open(&clicked, "", 1200);
    assert_eq!((sorted(&dom).as_slice(), console.as_str()), (&one_process[..], ""));
    assert!(title(&dom).starts_with('#') && title(&dom).contains("where=one"), "the answers are in the address: {dom}");

    assert_it_fits_a_phone(&chromium, dir.path(), &page);
}

/// Each of the elements that only a mouse could reach, and each picture and input that a screen reader finds without words.
const OUT_OF_REACH: &str = "[
    ...[...document.querySelectorAll('.wide')].filter(one => one.tabIndex < 0),
    ...[...document.querySelectorAll('a')].filter(one => one.tabIndex < 0 || !one.textContent.trim()),
    ...[...document.querySelectorAll('input')].filter(one => one.tabIndex < 0 || !one.labels.length),
    ...[...document.querySelectorAll('svg')].filter(one => !one.closest('[role=img][aria-label]')),
    ...[...document.querySelectorAll('a[href^=\"#\"]')].filter(one => !document.querySelector(one.getAttribute('href'))),
].map(one => one.outerHTML).join(' ') || 'nothing'";

/// What the text and the ground have of light, from 0 to 765.
const LIGHT: &str = "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]
    .map(color => color.match(/\\d+/g).slice(0, 3).map(Number).reduce((one, two) => one + two)).join(' on ')";

#[tokio::test(flavor = "multi_thread")]
async fn the_page_is_read_in_the_dark_on_paper_and_without_a_mouse() {
    let chromium = chromium();
    let server = RedisServer::start(RedisOptions::default()).await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let page = compare(dir.path(), &server.url(), &["--only", "alone,keys,processes"]);
    let told = |args: &[&str], script| told(&chromium, dir.path(), args, &page, script);

    let light = |args: &[&str]| {
        let light = told(args, LIGHT);
        let (text, ground) = light.split_once(" on ").expect("two colours");
        (text.parse::<u32>().expect("a number"), ground.parse::<u32>().expect("a number"))
    };
    let (text, ground) = light(&[]);
    assert!(text < 150 && ground > 700, "dark on light: {text} on {ground}");
    let (text, ground) = light(&["--blink-settings=preferredColorScheme=0"]);
    assert!(text > 600 && ground < 150, "light on dark: {text} on {ground}");

    assert_eq!(told(&[], OUT_OF_REACH), "nothing");

    let paper = dir.path().join("comparison.pdf");
    let print = format!("--print-to-pdf={}", paper.display());
    browse(&chromium, &dir.path().join("profile"), &[&print], &page, "");
    let pdf = fs::read(&paper).expect("printed");
    let pages = pdf.windows(12).filter(|part| part.starts_with(b"/Type /Page") && part[11] != b's').count();
    assert!(pdf.starts_with(b"%PDF") && (2..=20).contains(&pages), "{pages} pages");
}
