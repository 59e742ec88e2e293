"""Gemma's turns as a chat template, for files of that family that hold none. Knows no tokenizer.

Written after Google's description of the format: turns of `user` and `model`; a system message goes before the first user turn.
"""

GEMMA_TEMPLATE = """\
{{ bos_token }}\
{% if messages and messages[0]['role'] == 'system' %}\
{% set system = messages[0]['content'] | trim + '\n\n' %}{% set turns = messages[1:] %}\
{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}\
{% for message in turns %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Gemma takes user and assistant messages in turn, after at most one system message') }}\
{% endif %}\
{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}\
{{ (system if loop.first else '') + message['content'] | trim + '<end_of_turn>\n' }}\
{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
