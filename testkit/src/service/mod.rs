//! Servers of others, private to the tests: started in a temporary folder on a free port, stopped by process id.
//!
//! A server is either **private** to one test, which may stop, kill and restart it, or **shared** by all tests of one run,
//! which are processes of their own: the first that needs it starts it. Either way a small keeper process ends it when its
//! last user is gone, however that one ended, and removes its folder: nothing is left behind.
//!
//! A new kind of server is a [`Recipe`]; see [`postgres`](crate::postgres).

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use onlyonce_prove::quiet_port;
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, geteuid, kill_process};
use tokio::task::spawn_blocking;

/// How long a server may take to start or to stop.
const START_PATIENCE: Duration = Duration::from_secs(120);

/// How long a shared server stays when nobody uses it: the next test of the run is about to start.
const SHARED_LINGER: &str = "5";

const KEEPER: &str = include_str!("keeper.sh");

/// How one kind of server is made.
pub trait Recipe: Send + Sync + 'static {
    /// Its name, part of its folder's.
    fn name(&self) -> &'static str;

    /// The unprivileged user that it runs as when the tests run as root; `None` where it does not mind.
    fn user_for_root(&self) -> Option<&'static str> {
        None
    }

    /// Fills the new folder, which belongs to the server's user.
    ///
    /// # Errors
    /// With what a person needs to know.
    fn prepare(&self, home: &Home) -> Result<()>;

    /// The command that runs the server in the foreground, in a folder inside of its home.
    fn command(&self, home: &Home) -> Command;

    /// Whether it answers now.
    fn is_ready(&self, home: &Home) -> bool {
        TcpStream::connect(home.addr()).is_ok()
    }

    /// Ends it in order, without waiting for its clients.
    fn stop_signal(&self) -> Signal {
        Signal::TERM
    }

    /// Ends it for good at once, freeing what the system does not free by itself.
    fn end_signal(&self) -> Signal {
        Signal::KILL
    }
}

/// Where one server lives.
#[derive(Clone, Debug)]
pub struct Home {
    folder: PathBuf,
    port: u16,
    user: Option<(u32, u32)>,
}

impl Home {
    /// The folder of everything that the server writes.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// A file or folder in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Its port on 127.0.0.1, the same over restarts.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Its address.
    pub fn addr(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.port))
    }

    /// A command that runs as the server's user, in its folder.
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new(program.as_ref());
        command.current_dir(&self.folder).stdin(Stdio::null());
        if let Some((user, group)) = self.user {
            command.uid(user).gid(group);
        }
        command
    }

    /// Runs a command to its end; its output is in the error.
    ///
    /// # Errors
    /// When it fails.
    pub fn run(&self, command: &mut Command) -> Result<String> {
        let output = command.output().with_context(|| format!("run {command:?}"))?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if !output.status.success() {
            bail!("{command:?}: {}: {}{}", output.status, text(&output.stdout), text(&output.stderr));
        }
        Ok(text(&output.stdout))
    }

    /// Writes a file that the server's user alone may read.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> Result<PathBuf> {
        let path = self.path(name);
        fs::write(&path, content).with_context(|| format!("write {}", path.display()))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        if let Some((user, group)) = self.user {
            chown(&path, Some(user), Some(group))?;
        }
        Ok(path)
    }
}

/// A server that runs while somebody holds this.
#[derive(Debug)]
pub struct Service<R> {
    recipe: R,
    home: Home,
    child: Mutex<Option<Child>>,
    // A shared lock on it says that the server is in use.
    _users: File,
}

impl<R: Recipe> Service<R> {
    /// Starts a server for one test alone.
    ///
    /// # Errors
    /// With the reason and the server's own log, when it does not start.
    pub fn private(recipe: R) -> Result<Self> {
        let mutex = root()?.join(format!("{}-private.lock", recipe.name()));
        open_lock(&mutex)?;
        Self::launch(recipe, &mutex, "0")
    }

    /// Uses the server that the tests of this run share, and starts it when this is the first. `recipe` must always be
    /// made alike.
    ///
    /// # Errors
    /// As [`Service::private`].
    pub fn shared(recipe: R) -> Result<Self> {
        // Other checkouts of this project on the same machine have servers of their own.
        let checkout = env!("CARGO_MANIFEST_DIR").bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let name = root()?.join(format!("{}-{checkout:016x}", recipe.name()));
        let mutex_path = name.with_extension("lock");
        let mutex = open_lock(&mutex_path)?;
        flock(&mutex, FlockOperation::LockExclusive)?;
        let current = name.with_extension("current");
        if let Some((home, users)) = read_current(&current)
            && home.path("in-use").exists()
            && recipe.is_ready(&home)
        {
            return Ok(Self { recipe, home, child: Mutex::new(None), _users: users });
        }
        let service = Self::launch(recipe, &mutex_path, SHARED_LINGER)?;
        fs::write(&current, format!("{}\n{}\n", service.home.folder.display(), service.home.port))?;
        Ok(service)
    }

    fn launch(recipe: R, mutex: &Path, linger: &str) -> Result<Self> {
        let user = recipe.user_for_root().filter(|_| geteuid().is_root()).map(user_ids).transpose()?;
        let folder = tempfile::Builder::new()
            .prefix(&format!("{}-", recipe.name()))
            .tempdir_in(root()?)
            .context("a temporary folder")?
            .keep();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o700))?;
        if let Some((user, group)) = user {
            chown(&folder, Some(user), Some(group))?;
        }
        let users = open_lock(&folder.join("users"))?;
        flock(&users, FlockOperation::LockShared)?;
        File::create(folder.join("in-use"))?;
        // From here on the keeper cleans up, whatever happens.
        let end = recipe.end_signal().as_raw().to_string();
        let mut keeper = Command::new("setsid");
        keeper.args(["-f", "sh", "-c", KEEPER, "keeper"]).arg(&folder).arg(mutex).args([linger, &end]);
        keeper.current_dir("/").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let started = keeper.status().context("start the keeper of a server by setsid (util-linux)")?;
        ensure!(started.success(), "the keeper of a server does not start: {started}");
        let mut home = Home { folder, port: 0, user };
        home.port = quiet_port()?;
        recipe.prepare(&home).with_context(|| format!("prepare a private {}", recipe.name()))?;
        let service = Self { recipe, home, child: Mutex::new(None), _users: users };
        service.start()?;
        Ok(service)
    }

    /// Where it lives.
    pub fn home(&self) -> &Home {
        &self.home
    }

    /// What it is made by.
    pub fn recipe(&self) -> &R {
        &self.recipe
    }

    /// Starts it again after [`Service::stop`] or [`Service::kill_9`], and waits until it answers.
    ///
    /// # Errors
    /// With its log, when it ends or does not answer in time.
    pub fn start(&self) -> Result<()> {
        let mut child = self.child.lock();
        ensure!(child.is_none(), "the {} runs already", self.recipe.name());
        let began = Instant::now();
        // A port that was free may be taken by the time it is used, and one that was used may still be busy.
        loop {
            let mut started = self.spawn()?;
            let ended = loop {
                if let Some(status) = started.try_wait()? {
                    break status;
                }
                if self.recipe.is_ready(&self.home) {
                    *child = Some(started);
                    return Ok(());
                }
                if began.elapsed() > START_PATIENCE {
                    bail!("the {} does not answer in time: {}", self.recipe.name(), self.log_tail());
                }
                sleep(Duration::from_millis(10));
            };
            let said = self.log_tail();
            if !said.contains("in use") || began.elapsed() > Duration::from_secs(10) {
                bail!("the {} ended at its start ({ended}): {said}", self.recipe.name());
            }
            sleep(Duration::from_millis(200));
        }
    }

    fn spawn(&self) -> Result<Child> {
        let log = OpenOptions::new().create(true).append(true).open(self.home.path("log"))?;
        let mut command = self.recipe.command(&self.home);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).process_group(0);
        let child = command.spawn().with_context(|| format!("start {command:?}"))?;
        fs::write(self.home.path("pid"), format!("{}\n", child.id()))?;
        Ok(child)
    }

    /// Its process id, while it runs and was started here.
    pub fn pid(&self) -> Option<u32> {
        self.child.lock().as_ref().map(Child::id)
    }

    /// Stops it in order and waits until it is gone.
    ///
    /// # Errors
    /// When it was not started here, or does not end.
    pub fn stop(&self) -> Result<()> {
        self.end_by(self.recipe.stop_signal())
    }

    /// Kills it and the processes it made, as a crash of the machine would, and waits until they are gone.
    ///
    /// # Errors
    /// When it was not started here.
    pub fn kill_9(&self) -> Result<()> {
        let pid = self.pid().context("it does not run, or was not started here")?;
        let _ = signal(pid, Signal::STOP);
        let children = children_of(pid);
        for child in &children {
            let _ = signal(*child, Signal::KILL);
        }
        self.end_by(Signal::KILL)?;
        let began = Instant::now();
        while children.iter().any(|child| is_alive(*child)) {
            ensure!(began.elapsed() < START_PATIENCE, "processes outlive SIGKILL");
            sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Stops the server in its tracks, each of its threads: it neither works nor answers until [`Service::resume`].
    ///
    /// # Errors
    /// When it was not started here, or does not stop.
    pub fn pause(&self) -> Result<()> {
        let began = Instant::now();
        for pid in self.signal_all(Signal::STOP)? {
            // The signal is sent, and threads that are at work see it a little later.
            while !is_stopped(pid) {
                ensure!(began.elapsed() < START_PATIENCE, "process {pid} does not stop");
                sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    }

    /// Lets it run on.
    ///
    /// # Errors
    /// When it was not started here.
    pub fn resume(&self) -> Result<()> {
        self.signal_all(Signal::CONT).map(drop)
    }

    // Answers the processes.
    fn signal_all(&self, what: Signal) -> Result<Vec<u32>> {
        let pid = self.pid().context("it does not run, or was not started here")?;
        signal(pid, what)?;
        let mut all = children_of(pid);
        for child in &all {
            let _ = signal(*child, what);
        }
        all.push(pid);
        Ok(all)
    }

    fn end_by(&self, how: Signal) -> Result<()> {
        let mut place = self.child.lock();
        let child = place.as_mut().context("it does not run, or was not started here")?;
        signal(child.id(), how)?;
        let began = Instant::now();
        while child.try_wait()?.is_none() {
            ensure!(began.elapsed() < START_PATIENCE, "it does not end: {}", self.log_tail());
            sleep(Duration::from_millis(5));
        }
        *place = None;
        Ok(())
    }

    /// What it wrote to its log so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.home.path("log")).unwrap_or_default()).into_owned()
    }

    fn log_tail(&self) -> String {
        let mut tail = Vec::new();
        if let Ok(mut log) = File::open(self.home.path("log")) {
            let length = log.metadata().map_or(0, |m| m.len());
            let _ = log.seek(SeekFrom::Start(length.saturating_sub(4000)));
            let _ = log.read_to_end(&mut tail);
        }
        String::from_utf8_lossy(&tail).into_owned()
    }
}

/// The program `name`, on the path or where Debian keeps it.
///
/// # Errors
/// When it is not installed.
pub fn program(name: &str, folders: &[&str]) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places: Vec<PathBuf> = folders.iter().map(PathBuf::from).collect();
    places.extend(std::env::split_paths(&path));
    places.extend(["/usr/sbin", "/usr/local/sbin", "/sbin"].map(PathBuf::from));
    let found = places.into_iter().map(|place| place.join(name)).find(|program| program.is_file());
    found.with_context(|| format!("{name} is not installed; ./test installs what the tests need"))
}

/// Runs what blocks beside the runtime.
///
/// # Panics
/// With the error, whole.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> T {
    let done = spawn_blocking(work).await.expect("it does not panic");
    done.unwrap_or_else(|error| panic!("{error:#}"))
}

/// One folder for the servers of this user, which their own users may pass through.
pub(crate) fn root() -> Result<PathBuf> {
    let uid = geteuid().as_raw();
    let root = std::env::temp_dir().join(format!("onlyonce-testkit-{uid}"));
    match fs::DirBuilder::new().mode(0o755).create(&root) {
        Ok(()) => fs::set_permissions(&root, fs::Permissions::from_mode(0o755))?,
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error).with_context(|| format!("create {}", root.display())),
    }
    let owner = fs::symlink_metadata(&root)?;
    ensure!(owner.is_dir() && owner.uid() == uid, "{} is not a folder of this user", root.display());
    Ok(root)
}

fn open_lock(path: &Path) -> Result<File> {
    let options = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path);
    options.with_context(|| format!("open {}", path.display()))
}

// The server that is in use now, held from here on. Under the mutex.
fn read_current(current: &Path) -> Option<(Home, File)> {
    let text = fs::read_to_string(current).ok()?;
    let (folder, port) = text.trim_end().split_once('\n')?;
    let folder = PathBuf::from(folder);
    let users = OpenOptions::new().read(true).write(true).open(folder.join("users")).ok()?;
    flock(&users, FlockOperation::NonBlockingLockShared).ok()?;
    let owner = fs::metadata(&folder).ok()?;
    let user = (geteuid().is_root() && owner.uid() != 0).then(|| (owner.uid(), owner.gid()));
    Some((Home { folder, port: port.parse().ok()?, user }, users))
}

fn user_ids(name: &str) -> Result<(u32, u32)> {
    let users = fs::read_to_string("/etc/passwd").context("read /etc/passwd")?;
    let find = |name: &str| {
        let line = users.lines().find(|line| line.split(':').next() == Some(name))?;
        let mut fields = line.split(':').skip(2);
        Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
    };
    find(name).or_else(|| find("nobody")).with_context(|| format!("there is no user {name}"))
}

fn signal(pid: u32, what: Signal) -> Result<()> {
    let pid = Pid::from_raw(i32::try_from(pid)?).context("a process id")?;
    Ok(kill_process(pid, what)?)
}

fn children_of(pid: u32) -> Vec<u32> {
    let Ok(processes) = fs::read_dir("/proc") else { return Vec::new() };
    let ids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    ids.filter(|id| stat_field(*id, 1).is_some_and(|parent| parent == pid.to_string())).collect()
}

pub(crate) fn is_alive(pid: u32) -> bool {
    stat_field(pid, 0).is_some_and(|state| state != "Z" && state != "X")
}

/// Whether none of its threads runs.
fn is_stopped(pid: u32) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return true };
    let states = threads.flatten().filter_map(|thread| stat_field_in(&thread.path(), 0));
    states.into_iter().all(|state| matches!(&*state, "T" | "t" | "Z" | "X"))
}

fn stat_field(pid: u32, index: usize) -> Option<String> {
    stat_field_in(&Path::new("/proc").join(pid.to_string()), index)
}

// A field of its stat after the name, which may hold anything.
fn stat_field_in(process: &Path, index: usize) -> Option<String> {
    let stat = fs::read_to_string(process.join("stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(index).map(str::to_owned)
}
