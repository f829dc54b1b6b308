//! The generated Envoy messages of the server in `src/grpc/generated/` match the files in its `proto/`. The test is here because the
//! server does not compile while they are wrong.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use prost::Message;
use prost_types::{FileDescriptorSet, field_descriptor_proto::Type};

/// If this variable is set, the files are written instead of compared.
const GENERATE: &str = "SLUICEGATE_GENERATE";

const SERVICE: &str = "envoy/service/ratelimit/v3/rls.proto";

/// The descriptors for server reflection.
const DESCRIPTORS: &str = "descriptors.bin";

#[test]
fn the_generated_code_matches_the_proto_files() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sluicegate-server");
    let checked_in = here.join("src/grpc/generated");
    let made = tempfile::tempdir().unwrap();
    generate(&here.join("proto"), made.path());
    if env::var_os(GENERATE).is_some() {
        for file in files(made.path()) {
            fs::copy(&file, checked_in.join(file.file_name().unwrap())).unwrap();
        }
    }
    let remedy = format!("run this test with {GENERATE}=1 and commit the files");
    let names = |directory: &Path| -> Vec<_> {
        files(directory).iter().map(|file| file.file_name().unwrap().to_owned()).collect()
    };
    assert_eq!(names(made.path()), names(&checked_in), "{remedy}");
    for file in files(made.path()) {
        let name = file.file_name().unwrap();
        let is_same = fs::read(&file).unwrap() == fs::read(checked_in.join(name)).unwrap();
        assert!(is_same, "{} is out of date: {remedy}", name.display());
    }
}

fn generate(protos: &Path, out: &Path) {
    let mut files = protox::compile([SERVICE], [protos]).unwrap();
    for file in &mut files.file {
        file.source_code_info = None;
    }
    fs::write(out.join(DESCRIPTORS), files.encode_to_vec()).unwrap();
    accept_any_bytes_as_values(&mut files);
    tonic_prost_build::configure().build_transport(false).out_dir(out).compile_fds(files).unwrap();
}

/// Changes values from strings to bytes, which have the same encoding. Envoy takes values from requests, which need not be UTF-8, and
/// a message that cannot be decoded would not be limited.
fn accept_any_bytes_as_values(files: &mut FileDescriptorSet) {
    let messages = files.file.iter_mut().flat_map(|file| &mut file.message_type);
    let nested = messages
        .filter(|message| message.name() == "RateLimitDescriptor")
        .flat_map(|message| &mut message.nested_type);
    let entries = nested.filter(|message| message.name() == "Entry").flat_map(|message| &mut message.field);
    let mut values: Vec<_> = entries.filter(|field| field.name() == "value").collect();
    assert_eq!(values.len(), 1);
    values[0].set_type(Type::Bytes);
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}
