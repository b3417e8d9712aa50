// files.rs - writes 64 MiB in several ways below a directory, and prints what is there afterwards.
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

extern "C" {
    fn mmap(at: *mut u8, length: usize, how: i32, flags: i32, fd: i32, offset: i64) -> *mut u8;
}
const LENGTH: usize = 64 << 20;

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path).unwrap()
}

fn show(name: &str, path: &Path, expected: &[u8]) {
    let mut found = Vec::new();
    File::open(path).unwrap().read_to_end(&mut found).unwrap();
    let sum = found.iter().fold(14695981039346656037u64, |sum, byte| (sum ^ *byte as u64).wrapping_mul(1099511628211));
    println!("{name} {} {sum:x} {}", found.len(), if found == expected { "same" } else { "different" });
}

fn main() {
    let directory = std::path::PathBuf::from(std::env::args().nth(1).unwrap());
    let bytes: Vec<u8> = (0..LENGTH as u64).map(|at| (at.wrapping_mul(0x9e3779b97f4a7c15) >> 40) as u8).collect();
    for piece in [4 << 20, 1 << 20, 4096, 1000003] {
        let (part, whole) = (directory.join("part"), directory.join("whole"));
        let mut file = open(&part);
        bytes.chunks(piece).for_each(|each| file.write_all(each).unwrap());
        file.sync_all().unwrap();
        fs::rename(&part, &whole).unwrap();
        show(&format!("written-{piece}"), &whole, &bytes);
    }
    let path = directory.join("threads");
    let file = open(&path);
    std::thread::scope(|scope| (0..4).for_each(|turn| {
        let (file, bytes) = (&file, &bytes);
        scope.spawn(move || (turn..32).step_by(4).for_each(|n| {
            file.write_all_at(&bytes[n << 21..(n + 1) << 21], (n as u64) << 21).unwrap()
        }));
    }));
    show("threads", &path, &bytes);
    let seen = unsafe { std::slice::from_raw_parts_mut(mmap(std::ptr::null_mut(), LENGTH, 3, 1, file.as_raw_fd(), 0), LENGTH) };
    let mut expected = bytes.clone();
    for at in (0..LENGTH).step_by(8 << 20) {
        seen[at..at + 5000].fill(at as u8);
        expected[at..at + 5000].fill(at as u8);
        file.write_all_at(&bytes[..2 << 20], at as u64 + (3 << 20)).unwrap();
        expected[at + (3 << 20)..at + (5 << 20)].copy_from_slice(&bytes[..2 << 20]);
    }
    println!("mapped {}", seen == &expected[..]);
    show("mapped-read", &path, &expected);
    let mut other = open(&directory.join("other"));
    other.write_all(&bytes[..9 << 20]).unwrap();
    fs::rename(directory.join("other"), &path).unwrap();
    other.set_len(5 << 20).unwrap();
    other.seek(SeekFrom::End(0)).unwrap();
    other.write_all(&bytes[5 << 20..]).unwrap();
    show("renamed-open", &path, &bytes);
    println!("replaced {}", seen == &expected[..]);
}
